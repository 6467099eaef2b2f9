"""The training job, from a config file to a run folder."""
