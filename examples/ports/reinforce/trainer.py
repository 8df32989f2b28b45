"""Reinforce: a batch is one episode, with the graph of its actions."""

import torch
from torch.distributions import Categorical

from trainwright import Trainer

from .cart_pole import CartPole


class Reinforce(Trainer):
    running_reward = 10.0

    def next_train_inputs(self, iterator):
        environment, log_probs, rewards, has_ended = CartPole(self.config.trainer.max_moves), [], [], False
        observation = environment.reset()
        while not has_ended:
            choice = Categorical(logits=self.model(observation.to(self.device)))
            action = choice.sample()
            log_probs.append(choice.log_prob(action))
            observation, reward, has_ended = environment.move(action.item())
            rewards.append(reward)
        self.running_reward = 0.05 * sum(rewards) + 0.95 * self.running_reward
        if self.running_reward > self.config.trainer.solved_at:
            self.stop(f"solved: the running reward is {self.running_reward:.1f}")
        returns, total = [], 0.0
        for reward in reversed(rewards):
            total = reward + self.config.trainer.gamma * total
            returns.insert(0, total)
        return {"log_probs": torch.stack(log_probs), "returns": torch.tensor(returns)}

    def forward(self, log_probs, returns):
        returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        return -(log_probs * returns).sum(), {"running_reward": self.running_reward}

    def state_dict(self):
        return {"running_reward": self.running_reward}

    def load_state_dict(self, state):
        self.running_reward = state["running_reward"]
