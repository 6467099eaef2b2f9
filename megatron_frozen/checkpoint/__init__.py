"""Checkpoints: Hugging Face folders into shards and back, merged adapters, the demo model, a job's own state."""
