"""Small runs for fake ranks: a Llama of two layers, on rows of zeros."""

from trainwright import RunConfig

MODEL = {
    "type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "max_positions": 64,
    "tie_embeddings": False,
}
LENGTH = 32


def small_run(mesh=None, **settings):
    """Returns a config without data, for use with a sequence length."""
    trainer = {"type": "language_model", "max_steps": 4, "optimizer": {"type": "adamw"}, "micro_batch_size": 2}
    whole = {"name": "small", "model": MODEL, "trainer": trainer, "runtime": {"device": "cpu", "mesh": mesh or {}}}
    for path, value in settings.items():
        section, _, key = path.partition("__")
        whole[section] = {**whole.get(section, {}), key: value} if key else value
    return RunConfig.from_dict(whole)
