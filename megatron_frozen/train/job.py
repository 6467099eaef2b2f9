"""A training run from its config to its summary.

Order: everything about the config, then the process groups, the output folder, the data, the weights; only then is the
first file written. What goes wrong on one rank ends all of them (see `comm.agreement`).
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_frozen import kernels
from megatron_frozen.checkpoint.demo_model import fetch_demo_model
from megatron_frozen.checkpoint.hf_folder import load_hf_folder, save_hf_folder
from megatron_frozen.checkpoint.train_state import (
    checkpoint_name,
    load_optimizer,
    load_random_state,
    load_state,
    prune,
    save_checkpoint,
    saying_what_to_remove,
)
from megatron_frozen.comm import (
    WORLD,
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_world_size,
    group_rank,
    on_first_rank,
    together,
)
from megatron_frozen.environment import launched_rank
from megatron_frozen.layers import ModelParallelConfig
from megatron_frozen.lora import apply_lora, load_adapter, save_adapter
from megatron_frozen.models import CausalLM
from megatron_frozen.train.batches import collate_all, unlabelled
from megatron_frozen.train.compiling import compile_layers
from megatron_frozen.train.config import DEMO_MODEL, TrainConfig, check_inputs, check_world
from megatron_frozen.train.dataset import Dataset, check_token_ids, load_dataset
from megatron_frozen.train.evaluate import evaluate
from megatron_frozen.train.launch import parallel_ranks
from megatron_frozen.train.reports import Reports
from megatron_frozen.train.run_folder import (
    CHECKPOINTS,
    FolderClaim,
    Start,
    begin,
    find_start,
    identity,
    print_summary,
)
from megatron_frozen.train.sample import Sample, answer, choose_sample
from megatron_frozen.train.schema import DTYPES
from megatron_frozen.train.sharding import cut_over_data_parallel, is_cut
from megatron_frozen.train.tokenizer import load_tokenizer
from megatron_frozen.train.trainer import Trainer


def train(config: TrainConfig) -> None:
    """Run `config` to its end. Every rank that torchrun started calls it; without torchrun it is one rank.

    Raises ConfigError before any process group or weight is touched, if the config alone shows that it cannot run.
    """
    check_inputs(config)
    check_world(config, world_size=launched_rank()[1])
    claim = FolderClaim(config.output_dir)

    def look() -> Start:
        claim.take()
        return find_start(config)

    ranks = parallel_ranks(
        tensor_model_parallel_size=config.tensor_model_parallel_size, timeout_s=config.distributed_timeout_s
    )
    with contextlib.closing(claim), ranks as device:
        start = on_first_rank(look, doing="reading output_dir")
        if group_rank(WORLD) == 0:
            for message in start.messages:
                print(message, flush=True)
        if start.summary is None:
            _Job(config, start=start, device=device, claim=claim).run()
        elif group_rank(WORLD) == 0:
            print("this run is finished; raise max_steps to go on, or give another output_dir for another run")
            print_summary(start.summary, config)


def model_folder(model: str) -> Path:
    """The checkpoint folder that a config's `model` names; the demo model is fetched first, by one rank."""
    if model == DEMO_MODEL:
        return on_first_rank(fetch_demo_model, doing="fetching the demo model")
    return Path(model)


class _Job:
    """A run between its start and its end."""

    def __init__(self, config: TrainConfig, *, start: Start, device: torch.device, claim: FolderClaim) -> None:
        self.config, self.device = config, device
        self.folder = Path(config.output_dir)
        self.source_folder = model_folder(config.model)
        with together(doing="reading the data"):
            self.tokenizer = load_tokenizer(self.source_folder)
            load = partial(load_dataset, tokenizer=self.tokenizer, config=config, model_folder=self.source_folder)
            train_data = load(config.train_data)
            held_out = load(config.eval_data) if config.eval_data else None
            self.sample = self._choose_sample(held_out)
            self.identity = identity(config)
        if group_rank(WORLD) == 0:
            print("loading the model", file=sys.stderr, flush=True)
        with saying_what_to_remove(start.resume_from):
            model = self._build_model(start)
        self.trainer = Trainer(model, config=config, rows=train_data.packed, device=device)
        self.eval_batches = self._eval_batches(held_out)
        self.before: dict[str, Any] = {}
        self.eval_loss: float | None = None  # of step `evaluated_step`
        self.saved_step = self.evaluated_step = -1
        # Tensor-parallel ranks draw the same dropout masks, data-parallel ones others.
        torch.manual_seed(config.seed + get_data_parallel_rank())
        if start.resume_from is not None:
            self._resume(start.resume_from)

        def mark() -> None:
            begin(config)
            claim.take()  # a folder that is new can only be held now

        on_first_rank(mark, doing="writing output_dir")
        self.reports = Reports(config, first_step=self.trainer.step, resumed=start.resume_from is not None)
        if config.fsdp and not is_cut(self.trainer.model):
            self.reports.say("fsdp has nothing to cut, as there is one data-parallel rank")
        if self.device.type == "cpu" and config.dtype == "bf16" and (reason := kernels.absent()) is not None:
            self.reports.say(f"steps take longer than they could, without the kernels for this CPU: {reason}")
        if config.compile:
            self.reports.say("the layers are compiled as they are first run, which takes a while")
        for data in (train_data, held_out):
            for report in data.reports if data is not None else ():
                self.reports.say(report)

    def run(self) -> None:
        """Train, evaluate and save until max_steps, then show what came of it."""
        trainer, config = self.trainer, self.config
        with contextlib.closing(self.reports):
            if trainer.step == 0:
                self.before = {"loss": self._evaluate(), "answer": self._answer()}
            while trainer.step < config.max_steps:
                self.reports.step(trainer.step + 1, trainer.run_step())
                if config.eval_every and trainer.step % config.eval_every == 0:
                    self._evaluate()
                if config.save_every and trainer.step % config.save_every == 0:
                    self._save()
            loss = self._evaluate()
            self._save()
            self._save_result()
        summary = {
            "step": trainer.step,
            "loss_before": self.before["loss"],
            "loss_after": loss,
            "question": self.sample.question if self.sample else None,
            "reference": self.sample.reference if self.sample else None,
            "answer_before": self.before["answer"],
            "answer_after": self._answer(),
            "result": str(self.folder / self._model_name),
        }
        on_first_rank(lambda: self.reports.finish(summary), doing="writing the summary")

    @property
    def _model_name(self) -> str:
        return "model" if self.config.lora is None else "adapter"

    def _choose_sample(self, held_out: Dataset | None) -> Sample | None:
        if self.config.sample_max_new_tokens == 0:
            return None
        rows = held_out.rows if held_out else ()
        sample = choose_sample(rows, prompt=self.config.sample_prompt, tokenizer=self.tokenizer)
        if sample is not None:
            check_token_ids(sample.prompt_ids, model_folder=self.source_folder, source="the sample prompt")
        return sample

    def _build_model(self, start: Start) -> CausalLM:
        config = self.config
        parallel = ModelParallelConfig(
            tensor_model_parallel_size=config.tensor_model_parallel_size,
            sequence_parallel=config.sequence_parallel,
            params_dtype=DTYPES["fp32" if config.lora is None else config.dtype],
        )
        folder = self.source_folder
        if config.lora is None and start.resume_from is not None:
            folder = start.resume_from / self._model_name
        cut = None
        if config.fsdp and get_data_parallel_world_size() > 1:
            casts = config.lora is None and config.dtype != "fp32"
            cast_to = DTYPES[config.dtype] if casts else None
            cut = partial(cut_over_data_parallel, device=self.device, cast_to=cast_to)
        model = load_hf_folder(folder, parallel=parallel, cut=cut)
        if cut is None:
            model.to(self.device)
        model.activation_checkpointing = config.activation_checkpointing
        if config.compile:
            compile_layers(model)
        if config.lora is not None:
            apply_lora(model, config.lora, seed=config.seed)
            if start.resume_from is not None:
                load_adapter(model, start.resume_from / self._model_name, dtype=config.lora.dtype)
        return model

    def _eval_batches(self, held_out: Dataset | None) -> list[Any]:
        if held_out is None:
            return []
        rows, size = held_out.packed, self.config.micro_batch_size
        own = rows[get_data_parallel_rank() :: get_data_parallel_world_size()]
        if is_cut(self.trainer.model):  # ranks gather weights together, so each needs as many batches as the first
            num_short = -(-len(rows) // get_data_parallel_world_size()) - len(own)
            own = [*own, *[unlabelled(rows[0])] * num_short]
        return collate_all(own, size=size, multiple_of=self.trainer.length_multiple, device=self.device)

    def _resume(self, checkpoint: Path) -> None:
        trainer = self.trainer
        with together(doing=f"resuming from {checkpoint}"), saying_what_to_remove(checkpoint):
            state = load_state(checkpoint)
            trainer.step, trainer.position, self.before = state["step"], state["position"], state["before"]
            load_optimizer(
                checkpoint,
                parameters=trainer.parameters,
                optimizer=trainer.optimizer,
                group=trainer.model.tp_group,
            )
            has_dropout = self.config.lora is not None and self.config.lora.dropout > 0
            if not load_random_state(checkpoint) and has_dropout and group_rank(WORLD) == 0:
                text = "is of another number of data-parallel ranks, so dropout starts a new random order"
                print(f"{checkpoint} {text}", flush=True)
        self.saved_step = trainer.step
        if state["eval_loss"] is not None:
            self.eval_loss, self.evaluated_step = state["eval_loss"], trainer.step

    def _evaluate(self) -> float | None:
        """The held-out loss, recorded; computed once per step. None without held-out rows."""
        step = self.trainer.step
        if self.config.eval_data is None:
            return None
        if self.evaluated_step != step:
            self.reports.say("evaluating")
            loss, tokens = evaluate(
                self.trainer.model, self.eval_batches, group=get_data_parallel_group(), precision=self.trainer.precision
            )
            self.reports.evaluation(step, loss=loss, tokens=tokens)
            self.eval_loss, self.evaluated_step = loss, step
        return self.eval_loss

    def _answer(self) -> str | None:
        if self.sample is None:
            return None
        self.reports.say("answering the sample")
        with self.trainer.precision():
            length = self.config.sample_max_new_tokens
            return answer(self.trainer.model, self.sample, tokenizer=self.tokenizer, max_new_tokens=length)

    def _save(self) -> None:
        trainer, checkpoints = self.trainer, self.folder / CHECKPOINTS
        if self.saved_step == trainer.step:
            return
        self.saved_step = trainer.step
        save_checkpoint(
            checkpoints / checkpoint_name(trainer.step),
            save_model=self._save_model,
            parameters=trainer.parameters,
            optimizer=trainer.optimizer,
            group=trainer.model.tp_group,
            state={
                "step": trainer.step,
                "position": trainer.position,
                "before": self.before,
                "eval_loss": self.eval_loss if self.evaluated_step == trainer.step else None,
                "run": self.identity,
            },
        )
        on_first_rank(lambda: prune(checkpoints, keep=self.config.keep_checkpoints), doing="removing old checkpoints")

    def _save_result(self) -> None:
        """The final adapter or model, in place of one that a run cut short at its very end has left."""
        target = self.folder / self._model_name
        on_first_rank(lambda: shutil.rmtree(target, ignore_errors=True), doing=f"removing the old {target}")
        self._save_model(self.folder)

    def _save_model(self, folder: Path) -> None:
        """Write the result into `folder`; every rank calls it."""
        target = folder / self._model_name
        if self.config.lora is None:
            save_hf_folder(self.trainer.model, target, source_folder=self.source_folder)
        else:
            save_adapter(self.trainer.model, target, base_model_name=str(self.source_folder))
