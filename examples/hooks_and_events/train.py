"""The run of run.yaml from a script, under another name, with a trainer that appends its own hook."""

from trainwright import CallbackHook, RunConfig, Trainer, build_trainer


class Announced(Trainer):
    @classmethod
    def build_hooks(cls, build):
        hooks = super().build_hooks(build)  # the default hooks and those of run.yaml
        hooks.append(CallbackHook(after_train=lambda trainer: print(f"done after {trainer.iter} updates")))
        return hooks


logs = build_trainer(RunConfig.load("run.yaml", ["name=announced"]), Announced).train()
print(f"valid/loss {logs['valid/loss']:.4f}")
