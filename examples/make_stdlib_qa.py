"""Make the default question-and-answer set from the docstrings of the Python standard library.

    python examples/make_stdlib_qa.py [folder]

The same Python gives the same two files. Held-out rows ask about other functions than training rows do, and their
answers share little text with any training answer.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

NUM_TRAIN = 800
NUM_EVAL = 64
NUM_PER_MODULE = 30
MAX_OVERLAP = 0.5
NUM_WORDS = range(10, 56)
MODULES = """
    abc argparse array ast asyncio base64 bdb binascii bisect bz2 calendar cmath cmd code codecs collections
    collections.abc colorsys concurrent.futures configparser contextlib contextvars copy csv ctypes dataclasses datetime
    decimal difflib dis email.message email.utils enum fileinput fnmatch fractions ftplib functools gc getpass gettext
    glob gzip hashlib heapq hmac html html.parser http.client http.cookiejar http.server imaplib importlib.metadata
    importlib.resources importlib.util inspect io ipaddress itertools json keyword linecache locale logging
    logging.handlers lzma mailbox math mimetypes multiprocessing netrc numbers operator os os.path pathlib pdb pickle
    pickletools pkgutil platform plistlib poplib pprint profile pstats queue quopri random re reprlib sched secrets
    selectors shelve shlex shutil signal smtplib socket socketserver sqlite3 ssl stat statistics string struct
    subprocess symtable sys sysconfig tarfile tempfile textwrap threading time timeit token tokenize trace traceback
    types typing unicodedata unittest unittest.mock urllib.error urllib.parse urllib.request uuid warnings wave weakref
    webbrowser wsgiref.util xml.dom.minidom xml.etree.ElementTree xml.sax.handler xmlrpc.client zipfile zipimport zlib
    zoneinfo
"""


def members(module: ModuleType, *, module_name: str) -> Iterator[tuple[str, object]]:
    """Qualified name and object of each public function, class and method that `module` offers."""
    public = getattr(module, "__all__", None) or vars(module)
    for name in sorted({name for name in public if not name.startswith("_")}):
        value = getattr(module, name, None)
        if inspect.isroutine(value):
            yield f"{module_name}.{name}", value
        elif inspect.isclass(value) and value.__name__ == name and not issubclass(value, BaseException):
            yield f"{module_name}.{name}", value
            for method, function in sorted(vars(value).items()):
                if not method.startswith("_") and (
                    inspect.isroutine(function) or isinstance(function, classmethod | staticmethod)
                ):
                    yield f"{module_name}.{name}.{method}", function


def answer_from(docstring: str) -> str | None:
    """The first paragraph of prose on one line, or None if it does not read as one or two plain sentences."""
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(docstring))
    if re.match(r"[\w.]+\(.*\)", paragraphs[0]):  # a signature, on a line or in a paragraph of its own
        paragraphs[0] = re.sub(r"\A[^\n]*\n?(--\s*)?", "", paragraphs[0])
        paragraphs = [paragraph for paragraph in paragraphs if paragraph.strip()]
    if not paragraphs or re.search(r"\n\s+\S|\n[-*=]|`\w+'", paragraphs[0]):  # indented, listed, `odd' quotes
        return None
    text = re.sub(r":\w+:`~?([^`]*)`", r"\1", paragraphs[0])
    text = re.sub(r"`+([^`]*)`+", r"\1", " ".join(text.split())).replace("*", "")
    plain = re.fullmatch(r"[A-Z][a-z][\x20-\x7e]*[a-z0-9)]\.", text)
    odd = re.search(r">>>|::|[<>{}|\\~_=#]|\w/|/\w|\.\.|' '|\bself\b|TODO|XXX|deprecated|https?", text, re.IGNORECASE)
    return text if plain and not odd and len(text.split()) in NUM_WORDS else None


def question_about(name: str, value: object) -> str:
    """The question whose answer is the docstring of `value`."""
    return f"What is {name} in Python?" if inspect.isclass(value) else f"What does {name} do in Python?"


def draw(text: str) -> str:
    """A key to sort by that mixes names well and is the same everywhere."""
    return hashlib.sha256(text.encode()).hexdigest()


def collect(module_names: Iterable[str]) -> list[tuple[str, str]]:
    """Questions and answers, each answer once, sorted by question."""
    pairs: dict[str, str] = {}
    for module_name in module_names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = importlib.import_module(module_name)
        count = 0
        for name, value in sorted(members(module, module_name=module_name), key=lambda member: draw(member[0])):
            docstring = getattr(value, "__doc__", None)
            answer = answer_from(docstring) if isinstance(docstring, str) else None
            if answer and answer not in pairs and count < NUM_PER_MODULE:
                pairs[answer] = question_about(name, value)
                count += 1
    return sorted((question, answer) for answer, question in pairs.items())


def split(pairs: list[tuple[str, str]], *, num_train: int, num_eval: int) -> tuple[list[tuple[str, str]], ...]:
    """Training and held-out pairs: a fixed draw, no held-out answer close to another answer."""
    drawn = sorted(pairs, key=lambda pair: draw(pair[0]))
    words = {pair: set(pair[1].lower().split()) for pair in drawn}

    def stands_alone(pair: tuple[str, str]) -> bool:
        return all(
            len(words[pair] & words[other]) <= MAX_OVERLAP * len(words[pair] | words[other])
            for other in drawn
            if other != pair
        )

    held_out = [pair for pair in drawn if stands_alone(pair)][:num_eval]
    train = [pair for pair in drawn if pair not in set(held_out)][:num_train]
    return sorted(train), sorted(held_out)


def to_jsonl(pairs: Iterable[tuple[str, str]]) -> str:
    """One chat row a line."""
    rows = (
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in pairs
    )
    return "".join(json.dumps(row) + "\n" for row in rows)


def main(folder: Path) -> None:
    """Write both files into `folder` and say what is in them."""
    train, held_out = split(collect(MODULES.split()), num_train=NUM_TRAIN, num_eval=NUM_EVAL)
    for name, pairs in (("stdlib_qa_train.jsonl", train), ("stdlib_qa_eval.jsonl", held_out)):
        (folder / name).write_text(to_jsonl(pairs), encoding="utf-8")
        words = Counter(len(answer.split()) for _, answer in pairs)
        print(f"{folder / name}: {len(pairs)} rows, answers of {min(words)} to {max(words)} words")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("data"))
