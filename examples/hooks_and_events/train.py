"""The run of run.yaml from a script, under another name: a trainer that appends a hook of its own."""

from trainwright import CallbackHook, RunConfig, Trainer, build_trainer


class Announced(Trainer):
    @classmethod
    def build_hooks(cls, build):
        hooks = super().build_hooks(build)  # the default ones and those of run.yaml
        hooks.append(CallbackHook(after_train=lambda trainer: print(f"done after {trainer.iter} updates")))
        return hooks


logs = build_trainer(RunConfig.load("run.yaml", ["name=announced"]), Announced).train()
print(f"valid/loss {logs['valid/loss']:.4f}")
