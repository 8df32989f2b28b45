"""show_wave: any function of the trainer can be a hook that is called every N steps; see `type: every` in run.yaml.

In Python the same is `Every(100)(show_wave)`, for example in a trainer's build_hooks:

    @classmethod
    def build_hooks(cls, build):
        return [*build.hooks(), Every(100)(show_wave)]
"""

import torch


def show_wave(trainer):
    """Prints a wave that the model has denoised, in one line."""
    wave = trainer.eval_data["valid"].dataset[0]["wave"].to(trainer.device)
    with torch.no_grad():
        restored = trainer.model(wave.unsqueeze(0))[0]  # on all processes: each may have a part of the weights
    if trainer.is_main_process:
        print(f"step {trainer.step:>4}  restored {draw(restored)}\n              clean {draw(wave)}")


def draw(wave):
    heights = (4 + 6 * wave).long().clamp(0, 7).tolist()
    return "".join("▁▂▃▄▅▆▇█"[height] for height in heights)
