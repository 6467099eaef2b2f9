# A small CPU image with the package and what training needs.
FROM python:3.11-slim
WORKDIR /opt/megatron_frozen
COPY setup.py pyproject.toml README.md LICENSE ./
COPY megatron_frozen ./megatron_frozen
RUN pip install --no-cache-dir ".[train]"
ENTRYPOINT ["megatron-frozen"]
