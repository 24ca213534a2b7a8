"""Sampling: the choice of the next token from its logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite
from sys import float_info
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from kvsift.errors import InvalidValue, LogitsError
from kvsift.methods import checks

if TYPE_CHECKING:
    from kvsift.models.hf.generation_config import GenerationSettings

BLOCK = 256  # random numbers drawn at once
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # constants of SplitMix64, as signed numbers
MIXERS = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)
NO_TOKEN = -1  # instead of a token, where captured steps had logits that are NaN or infinite
Choice = Literal["greedy", "drawn", "nucleus"]  # of the tokens of several sequences; nucleus: some have a top_p below 1
CHOICES: tuple[Choice, ...] = get_args(Choice)


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens.

    Attributes:
        temperature: 0 is greedy; higher is more random.
        top_p: draw from the most likely tokens that together reach this probability.
        seed: seed of the random numbers, which come from a generator of their own.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        checks.use_python_numbers(self)
        if not _is_number(self.temperature) or not 0 <= self.temperature <= float_info.max:
            raise InvalidValue(f"temperature={self.temperature!r} must be a number, 0 (greedy) or more.")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise InvalidValue(f"top_p={self.top_p!r} must be a number greater than 0 and at most 1.")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 1 << 63:
            raise InvalidValue(f"seed={self.seed} must be a whole number, 0 or more and below 2**63.")

    def nth(self, number: int) -> Sampling:
        """The sampling of one of several answers: the first one's is this, and no two that begin at seeds side by side
        share one."""
        if number == 0:
            return self
        mixed = self.seed + number * GOLDEN & (1 << 64) - 1
        for shift, factor in ((30, MIXERS[0]), (27, MIXERS[1])):  # SplitMix64
            mixed = (mixed ^ mixed >> shift) * factor & (1 << 64) - 1
        return replace(self, seed=(mixed ^ mixed >> 31) >> 1)

    def noise(self, stop: int, start: int = 0) -> Tensor:
        """Return a random whole number for each of the tokens start to stop, int64; the same on every device."""
        generator = torch.Generator().manual_seed(self.seed)
        blocks = [torch.randint(1 << 62, (BLOCK,), generator=generator) for _ in range(-(-stop // BLOCK))]
        return torch.cat([torch.empty(0, dtype=torch.int64), *blocks])[start:stop]

    def chooser(self, device: torch.device) -> Chooser:
        """Return what chooses the tokens of one answer."""
        return Chooser(self, device)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def choice_of(samplings: Iterable[Sampling]) -> Choice:
    """Return how the tokens of sequences with these samplings are chosen together."""
    drawn = [sampling for sampling in samplings if sampling.temperature > 0]
    return "nucleus" if any(sampling.top_p < 1 for sampling in drawn) else "drawn" if drawn else "greedy"


class Chooser:
    """Chooses the tokens of one answer, each with a random number of its own.

    Args:
        sampling: how.
        device: device of the logits.
    """

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self._sampling, self._device = sampling, device
        self._token, self._drawn = 0, sampling.noise(0)

    @cached_property
    def _factors(self) -> tuple[Tensor, Tensor | None]:
        """Temperature and top_p; made with the first token, in a step: no thread may copy while another captures."""
        numbers = [[self._sampling.temperature], [self._sampling.top_p]]
        temperature, top_p = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        return temperature, top_p if choice_of([self._sampling]) == "nucleus" else None

    def __call__(self, logits: Tensor | int) -> int:
        """The next token, from logits [vocabulary], or as a captured step has chosen it; to be called once per token.

        Raises:
            LogitsError: if a logit is NaN or infinite, or all are -inf. Some may be -inf: such tokens are never chosen.
        """
        token, best = (logits, 0.0) if isinstance(logits, int) else self._chosen(logits, 0)
        if token == NO_TOKEN or not isfinite(best):
            raise LogitsError(
                f"no token can be chosen for token {self._token + 1} of the answer: {_fault(logits)}. An overflow in "
                "float16, or damaged weights, do that. Load the model in bfloat16 or float32, or check its files."
            )
        self._token += 1
        return token

    def foresee(self, logits: Tensor, ahead: int) -> int:
        """The token that these logits would give ``ahead`` calls from now; any token if they give none."""
        return self._chosen(logits, ahead)[0]

    def _chosen(self, logits: Tensor, ahead: int) -> tuple[int, float]:
        """The token, and the largest logit, which is NaN if any is."""
        if self._sampling.temperature == 0:
            token = int(logits.argmax())  # of a NaN before any number
            return token, float(logits[token])
        token = self._token + ahead
        if token >= len(self._drawn):
            self._drawn = self._sampling.noise(2 * token + 1)
        noise = self._drawn[token : token + 1].to(self._device)
        temperature, top_p = self._factors
        tokens, best = draw(logits.float().unsqueeze(0), temperature, noise, top_p)
        return int(tokens), float(best)


def _fault(logits: Tensor | int) -> str:
    """Say why no token can be chosen from logits [vocabulary]; a captured step does not keep them."""
    if isinstance(logits, int):
        return "logits of the model are NaN or infinite"
    wrong = (~(logits < torch.inf)).nonzero().flatten()  # NaN is not below anything
    if not len(wrong):
        return "all logits of the model are -inf"
    token = int(wrong[0])
    return (
        f"{len(wrong)} of {len(logits)} logits of the model are NaN or infinite; the first, of token {token}, is "
        f"{float(logits[token])}"
    )


class ConstrainedChooser:
    """Chooses the tokens of one answer from logits that depend on the tokens before them.

    Args:
        chooser: chooses the tokens.
        settings: the model's settings.
        ids: tokens of the prompt.
        max_new_tokens: most tokens of the answer.
        device: device of the logits.
    """

    def __init__(
        self, chooser: Chooser, settings: GenerationSettings, ids: Sequence[int], max_new_tokens: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._choose, self._settings, self._prompt, self._most = chooser, settings, ids, max_new_tokens
        self._device, self._length = device, len(ids)

    @cached_property
    def _state(self) -> tuple[Callable[[Tensor, Tensor], Tensor], Tensor]:
        """The processors, and the tokens of the prompt, the answer and drafts, int64 [1, room]; made with the first
        token, in a step (see ``Chooser``)."""
        room = len(self._prompt) + self._most + 1
        tokens = torch.zeros(1, room, dtype=torch.int64)
        tokens[0, : len(self._prompt)] = torch.tensor(self._prompt)
        processors = self._settings.processors(len(self._prompt), self._most, self._device)
        return processors, tokens.to(self._device)

    def __call__(self, logits: Tensor | int) -> int:
        assert isinstance(logits, Tensor), "with these settings no step is captured"
        token = self._choose(self._changed(logits, self._length))
        self._note(token, self._length)
        self._length += 1
        return token

    def foresee(self, logits: Tensor, ahead: int) -> int:
        """As ``Chooser.foresee``; what was foreseen for the calls before is taken for their tokens."""
        position = self._length + ahead
        token = self._choose.foresee(self._changed(logits, position), ahead)
        self._note(token, position)
        return token

    def _changed(self, logits: Tensor, position: int) -> Tensor:
        """Logits [vocabulary] of the token at a position of the sequence, float32."""
        processors, tokens = self._state
        return processors(tokens[:, :position], logits.to(torch.float32, copy=True).unsqueeze(0))[0]

    def _note(self, token: int, position: int) -> None:
        tokens = self._state[1]
        if position < tokens.shape[1]:
            tokens[0, position] = token


def draw(logits: Tensor, temperature: Tensor, noise: Tensor, top_p: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Draw a token for every sequence: the largest logarithm of a probability plus Gumbel noise of its own.

    The noise of a token is made of the sequence's random number and the token alone, so that two sequences of nearly
    the same logits and the same number nearly always draw the same token: drafts of exact decoding come true.

    Args:
        logits: float32 [sequences, vocabulary].
        temperature: float64 [sequences]; 0 chooses the likeliest.
        noise: int64 [sequences], random.
        top_p: float64 [sequences]; sorts the logits, and without it any token may be drawn.

    Returns:
        The tokens, int64 [sequences], and the largest logits, float32 [sequences].
    """
    best, greedy = likeliest(logits)
    # differences are at most 0, so division by any positive temperature is safe
    divisor = torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
    scaled = (logits.double() - best.unsqueeze(1)) / divisor
    noisy = scaled + gumbel(noise.unsqueeze(1), torch.arange(logits.shape[1], device=logits.device))
    if top_p is not None:
        noisy.masked_fill_(_outside(logits, scaled, top_p), -torch.inf)
    return torch.where(temperature > 0, likeliest(noisy)[1], greedy), best


def _outside(logits: Tensor, scaled: Tensor, top_p: Tensor) -> Tensor:
    """Whether more likely tokens, or earlier ones as likely, reach ``top_p`` [sequences]; bool [sequences,
    vocabulary]."""
    order = logits.sort(dim=-1, descending=True, stable=True)
    probability = scaled.gather(1, order.indices).softmax(-1)
    # a single sequence would be added up in another order than one beside others
    summed = (torch.cat([probability, probability]) if len(scaled) == 1 else probability).cumsum(-1)[: len(scaled)]
    outside = summed - probability >= top_p.unsqueeze(1)
    return torch.empty_like(outside).scatter_(-1, order.indices, outside)


def gumbel(noise: Tensor, tokens: Tensor) -> Tensor:
    """Return Gumbel noise for tokens by random numbers, both int64 and of shapes that broadcast; float64.

    The numbers are mixed as in SplitMix64 (https://doi.org/10.1145/2714064.2660195).
    """
    mixed = noise + (tokens + 1) * GOLDEN
    for shift, factor in ((30, MIXERS[0]), (27, MIXERS[1])):
        mixed = (mixed ^ (mixed >> shift & (1 << 64 - shift) - 1)) * factor
    mixed = mixed ^ (mixed >> 31 & (1 << 33) - 1)
    uniform = ((mixed >> 11 & (1 << 53) - 1).double() + 0.5) / (1 << 53)
    return -(-uniform.log()).log()


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logits and the first token that has them; [batch, vocabulary] -> [batch], int64 [batch].
    NaN counts as larger than any number.

    In two steps, since a GPU reduces each sequence on a single multiprocessor.
    """
    vocabulary = logits.shape[-1]
    parts = next(number for number in (256, 128, 64, 1) if vocabulary % number == 0)
    values, indices = logits.unflatten(-1, (parts, -1)).max(-1)
    best, part = values.max(-1, keepdim=True)
    return best.squeeze(-1), (part * (vocabulary // parts) + indices.gather(-1, part)).squeeze(-1)
