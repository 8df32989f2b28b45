"""The loop that the port replaces: `python original.py`."""

import torch
from cart_pole import CartPole
from model import Policy
from torch.distributions import Categorical


def train(model, episodes, gamma=0.99, max_moves=200):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    environment, running_reward = CartPole(max_moves), 10.0
    model.train()
    for _ in episodes:
        observation, log_probs, rewards, has_ended = environment.reset(), [], [], False
        while not has_ended:
            choice = Categorical(logits=model(observation))
            action = choice.sample()
            log_probs.append(choice.log_prob(action))
            observation, reward, has_ended = environment.move(action.item())
            rewards.append(reward)
        running_reward = 0.05 * sum(rewards) + 0.95 * running_reward
        returns, total = [], 0.0
        for reward in reversed(rewards):
            total = reward + gamma * total
            returns.insert(0, total)
        returns = torch.tensor(returns)
        returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        loss = -(torch.stack(log_probs) * returns).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item(), running_reward


if __name__ == "__main__":
    torch.manual_seed(0)
    for number, (_, reward) in enumerate(train(Policy(), range(300)), start=1):
        if number % 50 == 0:
            print(f"episode {number}: running reward {reward:.1f}")
