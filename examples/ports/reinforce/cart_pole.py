"""CartPole: a pole on a cart that is pushed to the left or the right; the episode ends when the pole falls."""

import math

import torch


class CartPole:
    def __init__(self, max_moves=200):
        self.max_moves = max_moves

    def reset(self):
        self.state, self.num_moves = (0.1 * torch.rand(4) - 0.05).tolist(), 0
        return torch.tensor(self.state)

    def move(self, action):
        """Returns the observation, the reward and whether the episode has ended."""
        position, speed, angle, spin = self.state
        force, sine, cosine = (10.0 if action else -10.0), math.sin(angle), math.cos(angle)
        push = (force + 0.05 * spin**2 * sine) / 1.1  # masses: the cart 1, the pole 0.1; half of the pole's length: 0.5
        twist = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        pull = push - 0.05 * twist * cosine / 1.1
        time = 0.02
        self.state = [position + time * speed, speed + time * pull, angle + time * spin, spin + time * twist]
        self.num_moves += 1
        has_fallen = abs(self.state[0]) > 2.4 or abs(self.state[2]) > math.radians(12)
        return torch.tensor(self.state), 1.0, has_fallen or self.num_moves == self.max_moves
