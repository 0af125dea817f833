"""PPO for a language model, whole and on one page.

    python examples/minimal_ppo.py

A tiny language model learns Leduc poker against a random opponent, in under a minute of one CPU core. It reads a
position as words and answers with the number of an action; a LoRA adapter and a value head are trained. Nothing is
downloaded. The algorithm is that of `train_ppo.py`: a test checks that both compute the same numbers on the same games.
Left out are chat templates, answers of several tokens, mixed games and opponents, the KL penalty, checkpoints, GPUs.

Shapes: P distinct prompts, T tokens, M decisions, A answers. Log-probabilities are in nats, rewards in chips.
"""

import random
import re
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyspiel
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

SEED, STEPS, GAMES, MINIBATCH, EPOCHS = 0, 120, 512, 128, 1  # GAMES per step, MINIBATCH games per update
LEARNING_RATE, ENTROPY_COEF, FALL = 3e-3, 0.1, 0.9  # both fall linearly, by the share FALL; LoRA tolerates high rates
CLIP, VALUE_COEF, MAX_GRAD_NORM, GAMMA, LAMBDA = 0.2, 0.5, 1.0, 1.0, 0.95

# %% [markdown]
# ## The game
# What a seat may know is written in words of one token each: `Ks ? raise :` is a king of spades after a raise, before
# the public card is dealt. The answers `0`, `1` and `2` are fold, call and raise.
# %%
GAME = pyspiel.load_game("leduc_poker")
CARDS, BETS, ANSWERS = ["Js", "Jh", "Qs", "Qh", "Ks", "Kh"], ["fold", "call", "raise"], ["0", "1", "2"]
VOCABULARY = {word: i for i, word in enumerate([*CARDS, *BETS, *ANSWERS, "?", "/", ":"])}


def prompt(view: str) -> tuple[int, ...]:
    """Write what a seat may know (OpenSpiel's information state) in words; return their token ids."""
    facts = dict(re.findall(r"\[(\w+): ?([^\]]*)\]", view))
    cards = [CARDS[int(facts[name])] if name in facts else "?" for name in ("Private", "Public")]
    first, second = ([BETS[int(bet)] for bet in facts[name].split()] for name in ("Round1", "Round2"))
    words = [*cards, *first, "/", *second, ":"] if "Public" in facts else [*cards, *first, ":"]
    return tuple(VOCABULARY[word] for word in words)


def advance(state: Any, seat: int, rng: random.Random) -> None:
    """Let chance and the opponent move until the seat has a choice to make, or the game is over."""
    while not state.is_terminal() and (state.current_player() != seat or len(state.legal_actions()) == 1):
        outcomes = state.chance_outcomes() if state.is_chance_node() else [(a, 1) for a in state.legal_actions()]
        state.apply_action(rng.choices(*zip(*outcomes, strict=True))[0])


# %% [markdown]
# ## The player
# A Qwen2 of two layers with random weights, whose standard deviation is ten times the usual one: they are not trained,
# so they must tell positions apart from the start. The policy is the model's own distribution over the legal answers;
# the critic reads the same hidden state, at the end of the prompt.
# %%
class Player(nn.Module):
    """A causal language model that answers with one token, and a value head."""

    def __init__(self, model: Any, head: nn.Linear, answers: list[int]) -> None:
        super().__init__()
        self.model, self.head, self.answers = model, head, answers

    def forward(self, prompts: list[tuple[int, ...]], legal_MA: Tensor) -> tuple[Tensor, Tensor]:
        """Read prompts (token ids); return log-probabilities of the answers (M, A) and values (M)."""
        distinct = {ids: row for row, ids in enumerate(dict.fromkeys(prompts))}  # many games start alike
        lengths = torch.tensor([len(ids) for ids in distinct])
        ids_PT = nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in distinct], batch_first=True)
        mask_PT = torch.arange(ids_PT.shape[1])[None] < lengths[:, None]
        out = self.model(input_ids=ids_PT, attention_mask=mask_PT.long(), output_hidden_states=True, use_cache=False)
        last = (torch.arange(len(lengths)), lengths - 1)
        at_M = torch.tensor([distinct[ids] for ids in prompts])
        logits_MA = out.logits[last][:, self.answers][at_M].masked_fill(~legal_MA, -1e9)
        return logits_MA.log_softmax(-1), self.head(out.hidden_states[-1][last])[at_M, 0]


def make_player() -> Player:
    """Build the model with its adapter, and a value head."""
    torch.manual_seed(SEED)
    base = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(VOCABULARY), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.2,
    ))  # fmt: skip
    model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    return Player(model, nn.Linear(64, 1), [VOCABULARY[answer] for answer in ANSWERS])


# %% [markdown]
# ## Play
# All games of a step are played together, one decision per game and round. Each decision keeps what the update needs.
# %%
@dataclass
class Decision:
    """One answer; its advantage and the critic's target are known once the game is over."""

    prompt: tuple[int, ...]
    legal: list[bool]
    pick: int
    logprob: float
    value: float
    advantage: float = 0.0
    target: float = 0.0


@dataclass
class Game:
    """What one seat decided in a game, and the chips it won."""

    seat: int
    decisions: list[Decision]
    reward: float = 0.0


@torch.no_grad()
def play(player: Player, games: int, seed: int) -> list[Game]:
    """Play games against uniformly random moves, half of them in each seat."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    played = [(Game(i % 2, []), GAME.new_initial_state()) for i in range(games)]
    while True:
        for game, state in played:
            advance(state, game.seat, rng)
        asked = [(game, state) for game, state in played if not state.is_terminal()]
        if not asked:
            break
        prompts = [prompt(state.information_state_string(game.seat)) for game, state in asked]
        legal = [[a in state.legal_actions() for a in range(len(ANSWERS))] for _, state in asked]
        logprobs_MA, values_M = player(prompts, torch.tensor(legal))
        picks_M = torch.multinomial(logprobs_MA.exp(), 1, generator=generator)
        chosen_M = logprobs_MA.gather(1, picks_M)[:, 0]
        columns = (prompts, legal, picks_M[:, 0].tolist(), chosen_M.tolist(), values_M.tolist())
        for (game, state), *decision in zip(asked, *columns, strict=True):
            game.decisions.append(Decision(*decision))
            state.apply_action(game.decisions[-1].pick)
    for game, state in played:
        game.reward = state.returns()[game.seat]
    return [game for game, _ in played if game.decisions]


# %% [markdown]
# ## Credit
# The unit of credit is a decision, not a token or a game: it is credited with what came after it and the critic did not
# expect ([GAE](https://arxiv.org/abs/1506.02438)). Rewards are standardised per seat, because one seat wins more than
# the other, and advantages over all decisions of the step.
# %%
def whiten(x_M: Tensor) -> Tensor:
    """Shift and scale to mean 0 and standard deviation 1."""
    return (x_M - x_M.mean()) / (x_M.std(correction=0) + 1e-8)


def credit(games: list[Game]) -> None:
    """Write advantages and the critic's targets into the decisions of a step's games."""
    rewards = torch.tensor([game.reward for game in games])
    for seat in (0, 1):
        rows = [i for i, game in enumerate(games) if game.seat == seat]
        rewards[rows] = whiten(rewards[rows])
    for game, reward in zip(games, rewards.tolist(), strict=True):
        advantage = next_value = 0.0
        for decision in reversed(game.decisions):
            delta = reward + GAMMA * next_value - decision.value
            advantage = delta + GAMMA * LAMBDA * advantage
            decision.advantage, decision.target = advantage, advantage + decision.value
            reward, next_value = 0.0, decision.value
    decisions = [decision for game in games for decision in game.decisions]
    for decision, advantage in zip(decisions, whiten(torch.tensor([d.advantage for d in decisions])), strict=True):
        decision.advantage = float(advantage)


# %% [markdown]
# ## Loss and update
# [PPO](https://arxiv.org/abs/1707.06347): the ratio of new to old probability times the advantage, without a gain from
# moving the ratio beyond the clip range. The value loss is clipped in the same way; a bonus keeps the entropy up.
# %%
def ppo_loss(player: Player, decisions: list[Decision], entropy_coef: float) -> Tensor:
    """The mean loss of decisions, a scalar."""
    columns = zip(*((d.logprob, d.value, d.advantage, d.target) for d in decisions), strict=True)
    old_M, old_value_M, advantage_M, target_M = (torch.tensor(column) for column in columns)
    legal_MA = torch.tensor([d.legal for d in decisions])
    logprobs_MA, value_M = player([d.prompt for d in decisions], legal_MA)
    logprob_M = logprobs_MA[torch.arange(len(decisions)), [d.pick for d in decisions]]
    ratio_M = (logprob_M - old_M).exp()
    policy_M = -torch.minimum(ratio_M * advantage_M, ratio_M.clamp(1 - CLIP, 1 + CLIP) * advantage_M)
    near_M = old_value_M + (value_M - old_value_M).clamp(-CLIP, CLIP)
    critic_M = 0.5 * torch.maximum((value_M - target_M) ** 2, (near_M - target_M) ** 2)
    entropy_M = -(logprobs_MA.exp() * logprobs_MA).sum(-1)
    return (policy_M + VALUE_COEF * critic_M - entropy_coef * entropy_M).mean()


def update(player: Player, optimizer: Any, games: list[Game], entropy_coef: float, key: tuple[int, ...]) -> None:
    """Shuffle the credited games, and take one optimizer step per minibatch."""
    for epoch in range(EPOCHS):
        order = np.random.default_rng((*key, epoch)).permutation(len(games))
        for start in range(0, len(order), MINIBATCH):
            chosen = [games[i] for i in order[start : start + MINIBATCH]]
            optimizer.zero_grad()
            ppo_loss(player, [d for game in chosen for d in game.decisions], entropy_coef).backward()
            nn.utils.clip_grad_norm_([p for p in player.parameters() if p.requires_grad], MAX_GRAD_NORM)
            optimizer.step()


# %% [markdown]
# ## How good is it?
# Leduc poker is small enough for an exact answer: the policy is read at every information state, and its expected
# winnings against random play are computed over the whole game tree, and so are those of a best response.
# %%
@torch.no_grad()
def share_of_ceiling(player: Player) -> float:
    """The exact value of the policy, both seats, as a share of the best response's; random play wins 0."""
    uniform = pyspiel.UniformRandomPolicy(GAME)
    views = uniform.policy_table()
    legal = [[a in dict(choices) for a in range(len(ANSWERS))] for choices in views.values()]
    probs_MA = player([prompt(view) for view in views], torch.tensor(legal))[0].exp().tolist()
    policy = pyspiel.TabularPolicy({view: list(enumerate(probs)) for view, probs in zip(views, probs_MA, strict=True)})
    start = GAME.new_initial_state()
    value = sum(pyspiel.expected_returns(start, [policy, uniform][:: 1 - 2 * seat], -1, True)[seat] for seat in (0, 1))
    return value / sum(pyspiel.TabularBestResponse(GAME, seat, uniform).value_from_state(start) for seat in (0, 1))


# %%
def train(steps: int = STEPS) -> list[tuple[int, float]]:
    """Alternate play and updates; print and return the curve: (step, share of the ceiling)."""
    player, curve = make_player(), []
    optimizer = torch.optim.AdamW([p for p in player.parameters() if p.requires_grad], weight_decay=0.0)
    for step in range(steps + 1):
        if step % 10 == 0 or step == steps:
            curve.append((step, share := share_of_ceiling(player)))
            print(f"step {step:3}{time.process_time():6.1f} CPU s  share {share:+.3f} {'#' * round(50 * share)}")
        if step < steps:
            left = 1 - FALL * step / steps
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * left
            games = play(player, GAMES, SEED + step)
            credit(games)
            update(player, optimizer, games, ENTROPY_COEF * left, (SEED, step))
    return curve


if __name__ == "__main__":
    torch.set_num_threads(1)  # for a model this small, threads mostly wait for each other
    curve = train()

# %% active="ipynb"
# import matplotlib.pyplot as plt
# _, axes = plt.subplots(figsize=(6, 2.5))
# axes.plot(*zip(*curve, strict=True), marker=".")
# axes.set(xlabel="steps of 512 games", ylabel="share of the ceiling");
