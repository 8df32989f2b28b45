"""The options, prompts, completions and rewards of the comparison with TRL; grpo_trl.py and tests use them."""

import random

from tests.references import preference_cases

NUM_PROMPTS = 2
NUM_GENERATIONS = 4
NUM_BATCHES = 2
MAX_COMPLETION_LENGTH = 6
RATE = 0.05
END = 1
WEIGHTS = (1.0, 0.5)
COMMON = {"num_generations": NUM_GENERATIONS, "max_completion_length": MAX_COMPLETION_LENGTH}
CASES = {
    "dapo": {"loss_type": "dapo"},
    "grpo": {"loss_type": "grpo", "beta": 0.1, "num_iterations": 2},
    "dr_grpo": {
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
        "num_iterations": 2,
        "epsilon": 0.02,
        "epsilon_high": 0.05,
    },
    "batch": {
        "loss_type": "dapo",
        "scale_rewards": "batch",
        "mask_truncated_completions": True,
        "beta": 0.2,
        "temperature": 0.7,
        "num_iterations": 2,
        "epsilon": 0.02,
    },
    "sequence": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "num_iterations": 2,
        "epsilon": 0.001,
        "epsilon_high": 0.002,
    },
}
METRICS = (
    *("reward", "reward_std", "frac_reward_zero_std", "kl", "entropy"),
    *("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"),
    *("rewards/evenness/mean", "rewards/evenness/std", "rewards/brevity/mean", "rewards/brevity/std"),
    *("completions/mean_length", "completions/clipped_ratio"),
)


def prompts():
    """Returns the texts of all prompts."""
    return [row["prompt"] for row in preference_cases.make_rows(NUM_PROMPTS * NUM_BATCHES)]


def completions():
    """Returns the tokens of the completions of each prompt; some have no end."""
    draw = random.Random(3)
    vocabulary = range(3, preference_cases.SIZES["vocab_size"])

    def make(number):
        if number == 1:  # a group whose rewards are equal
            return [5, 7, 9, END]
        length = draw.randint(1, MAX_COMPLETION_LENGTH)
        ids = draw.choices(vocabulary, k=length)
        return ids if length == MAX_COMPLETION_LENGTH else [*ids, END]

    return [[make(number) for _ in range(NUM_GENERATIONS)] for number in range(NUM_PROMPTS * NUM_BATCHES)]


def evenness(completion_ids, **columns):
    """The share of even tokens."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def brevity(completion_ids, **columns):
    """Minus the length, where the first token is odd."""
    return [-float(len(ids)) if ids[0] % 2 else None for ids in completion_ids]
