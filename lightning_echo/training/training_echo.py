"""`TrainingEcho`: the training loader of a run, echoed: what `EchoDataModule` and `EchoCallback` have in common.

It stands between who is asked for the training loader and who made it: it wraps what the user's ``train_dataloader`` returns
(`Wrapping`), carries factor, place and counts from one loader to the next, and lets the Trainer hear of a new length of epochs.
A collection of loaders is a loader for each of its leaves (`collection`), a single one the leaf without a name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_echo.config import EchoConfig
from lightning_echo.insertion import Needs, earliest
from lightning_echo.loading import options
from lightning_echo.loading.loader import EchoLoader
from lightning_echo.loading.state import EchoStateError, is_state
from lightning_echo.training.forecast import forecast
from lightning_echo.training.lengths import Attached, Estimate, Reload, check_factor, too_short_schedules
from lightning_echo.training.several import Echoed, common_factor, echoed_in, parts_of
from lightning_echo.training.ties import Ties
from lightning_echo.training.transfer import TransferHooks
from lightning_echo.training.wrapping import Wrapping

__all__ = ["TrainingEcho"]


class TrainingEcho:
    """The training loader of a run, echoed.

    Args:
        config: The options of the `EchoLoader`, or of those of a collection that are echoed, by name.
        attached: Asked for the Trainer whenever it is needed.
        owner: What the user has in hands: named where something must be set there and not on the loader.
        way_out: What to do where the user's loader is an `EchoLoader` already, to end a sentence; None: it is taken as it is.
        shard: Whether each rank gets its share of the data.

    Attributes:
        is_asked: Whether the Trainer of this ``fit`` asks here for its loader, and so gets one that was wrapped here.
        estimate: Whether the model has asked how long the run will be.

    Raises:
        TypeError: ``shard`` is no truth value.
    """

    def __init__(
        self,
        config: EchoConfig | Mapping[str, EchoConfig],
        attached: Attached,
        *,
        owner: str,
        way_out: str | None = None,
        shard: bool = True,
    ) -> None:
        if not isinstance(shard, bool):
            raise TypeError(f"shard must be True or False, got {shard!r}")
        self._wrapping = Wrapping(config, owner, way_out, shard)
        self._attached, self._owner, self._reload = attached, owner, Reload(attached)
        self._factor: float | None = None  # that was set, or was in force, while there was no loader
        self._loader: Any = None  # what the Trainer has: an EchoLoader, or a collection with them
        self._echoed: Echoed | None = None  # those in it
        self._state: dict[str, Any] | None = None  # of a loader that does not exist yet
        self._ties, self._transfer_hooks = Ties(attached, owner), TransferHooks()
        self.is_asked = False
        self.estimate = Estimate()
        self._said = self._warned = False

    @property
    def loader(self) -> Any:
        """The `EchoLoader` in use, or the collection with them; None before the Trainer has asked, and with
        ``Trainer(overfit_batches=...)``."""
        return self._loader

    @property
    def _parts(self) -> Mapping[str, EchoLoader]:
        return parts_of(self._echoed)

    # ------------------------------------------------------------------ factor

    @property
    def factors(self) -> dict[str, float]:
        """The echo factor last set of each loader; a single one has the empty name."""
        if self._echoed is not None:
            return {name: loader.factor for name, loader in self._parts.items()}
        configs = self._wrapping.configs.items()
        return {name: float(config.factor) if self._factor is None else self._factor for name, config in configs}

    @property
    def factor(self) -> float:
        """The echo factor last set.

        Raises:
            MisconfigurationException: There are several loaders with factors of their own.
        """
        return common_factor(self.factors)

    @factor.setter
    def factor(self, value: float) -> None:
        value = options.check_factor(value)
        if self._echoed is None:
            self._factor = value
        elif set(self.factors.values()) != {value}:
            self._change_factor(self._echoed, value)

    def _change_factor(self, echoed: Echoed, value: float) -> None:
        trainer = self._attached.trainer
        training = trainer is not None and trainer.training
        full_passes = [part for part in self._parts.values() if part.epoch_length == "full_pass" and training]
        if full_passes:
            check_factor(trainer, echoed, value)
            self.expect_factor(value)
        full_passes = [part for part in full_passes if part.has_length]  # else Lightning finds out where an epoch ends
        for loader in self._parts.values():
            loader.check_factor(value)  # all of them, before any is set
        if self.is_asked:  # then it answers the reload, and says the new length there
            for loader in full_passes:
                loader.keep_length()
        for loader in self._parts.values():
            loader.set_factor(value)
        if full_passes:
            self._reload.order()

    def expect_factor(self, value: float) -> None:
        """Warns once if a factor, set during training, would make the run longer than a schedule of the learning rate knows."""
        if self._echoed is None or self._warned or not self.estimate.was_read:
            return
        if said := too_short_schedules(self._attached.trainer, self._echoed, value):
            self._warned = True
            rank_zero_warn(f"lightning_echo: {said}")

    # ------------------------------------------------------------------ loader

    def begin_fit(self, trainer: Any) -> None:
        """A ``fit`` is being set up; to be called before its optimizers are."""
        self._warned = False
        self.estimate.begin(trainer)

    def train_dataloader(self, ask: Callable[[], Any], *, is_dealt_out: bool = False) -> Any:
        """What the Trainer gets: what the user's ``train_dataloader`` (``ask``) returns, echoed.

        Args:
            ask: Returns the user's loader, or a collection of them.
            is_dealt_out: Whether Lightning has dealt the data out to the ranks already, where it does so.

        Raises:
            MisconfigurationException: The user's loader cannot be echoed, or is already.
        """
        self.is_asked, only_for_length = True, self.end_own_reload()
        if (trainer := self._attached.trainer) is not None:
            self.estimate.asked(trainer)
        if self._echoed is not None:
            for loader in self._parts.values():
                loader.release_length()
            if only_for_length:
                self._order_reload_after_resuming()
                return self._loader
        given = ask()
        if trainer is not None and trainer.overfit_batches > 0:
            self.close()
            factors = set(self.factors.values())
            self._factor = factors.pop() if len(factors) == 1 else None
            self._loader = self._echoed = None
            rank_zero_info("lightning_echo: Trainer(overfit_batches=...) trains on the same few batches; echoing is off")
            return given
        return self.use(self._wrapping.wrap(given, self._parts, self._factor, trainer, is_dealt_out=is_dealt_out))

    def adopt(self, loader: Any) -> None:
        """Takes a loader that the Trainer has already, and trains with now: an `EchoLoader`, or a collection with them.

        Raises:
            MisconfigurationException: The factor to begin with would change the length of the epoch that is about to begin.
        """
        self.is_asked = False
        for part in parts_of(echoed_in(loader)).values():
            if (
                part.epoch_length == "full_pass"
                and part.has_length
                and self._echoed is None
                and self._factor not in (None, part.factor)
            ):
                raise MisconfigurationException(
                    f"{self._owner} begins with factor {self._factor:g}, but the epoch's length is settled already: with "
                    f"epoch_length='full_pass' pass EchoLoader(loader, {self._factor:g}, ...) to fit"
                )
        self.use(loader)

    def is_in_use(self, loader: Any) -> bool:
        """Whether what a Trainer trains on is what it got here; Lightning makes a collection anew around its leaves."""
        parts = parts_of(echoed_in(loader))
        return bool(parts) and parts.items() == self._parts.items()

    def use(self, loader: Any) -> Any:
        """Makes a loader the one in use; it goes on where the one before stands, or with a state that waits for it."""
        before, self._loader, self._echoed = self._parts, loader, echoed_in(loader)
        self._follow_transfer()
        for name, part in self._parts.items():
            self._take(part, before.get(name), is_first=not before)
        for name, part in before.items():
            if name not in self._parts:
                part.close()
        if before and before.keys() != self._parts.keys():
            rank_zero_warn(
                f"train_dataloader returned loaders named {_said(before)} before and returns {_said(self._parts)} now: those of "
                "the same name go on, the others begin anew"
            )
        if self._state is not None:
            self._load(self._state)
            self._state = None
            self._order_reload_after_resuming()
        self._say()
        return loader

    def _follow_transfer(self) -> None:
        if isinstance(self._echoed, EchoLoader):
            self._transfer_hooks.follow(self._echoed, self._attached.trainer)
            return
        self._transfer_hooks.unbind()
        for name, part in self._parts.items():
            if part.insertion_point.on_device:
                raise MisconfigurationException(
                    f"{part.insertion_point.option} is impossible for the loader {name!r} of a collection, whose batches are "
                    f"transferred together: use '{earliest(Needs.batches)}' there, or return a single loader"
                )

    def _take(self, loader: EchoLoader, before: EchoLoader | None, *, is_first: bool) -> None:
        """One loader of those in use takes the place of the one of the same name."""
        self._ties.tie(loader, self._loader)
        if before is not None and before is not loader:
            before.close()
            loader.follow(before)
        elif is_first and self._factor is not None:
            loader.set_factor(self._factor)
        self._ties.limit(loader)

    def _say(self) -> None:
        """Says once what the run will amount to."""
        trainer, echoed = self._attached.trainer, self._echoed
        if not self._said and trainer is not None and echoed is not None:
            self._said = True
            if said := forecast(trainer, echoed):
                rank_zero_info(f"lightning_echo: {said}")

    def close(self) -> None:
        """Ends workers and thread; a later epoch starts them anew and goes on where this one stopped."""
        self._transfer_hooks.unbind()
        for loader in self._parts.values():
            loader.close()

    def let_go(self) -> None:
        """Leaves the loaders to themselves, while there still is a Trainer: they may be the user's own, and used elsewhere."""
        self._ties.untie(self._parts.values())

    # ------------------------------------------------------------------ the length of epochs

    def _order_reload_after_resuming(self) -> None:
        """A resumed epoch keeps its length; where the factor has changed since it began, the next one has another."""
        if any(loader.keeps_length for loader in self._parts.values()):
            self._reload.order()

    def end_own_reload(self) -> bool:
        """Gives the Trainer's setting back; whether only we have asked for this reload."""
        return self._reload.end()

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any] | None:
        """The loader's state (``{"loaders": states by name}`` of a collection), or the one that waits for it; None: neither.

        Saved beside what Lightning saves of the loader itself, since that is forgotten where the model reads
        ``trainer.estimated_stepping_batches``.
        """
        if self._echoed is None:
            return self._state
        if isinstance(self._echoed, EchoLoader):
            return self._echoed.state_dict()
        return {"loaders": {name: loader.state_dict() for name, loader in self._parts.items()}}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Goes on where a state was taken; None was saved before there was a loader: the start of the run.

        Raises:
            EchoStateError: The state is of other loaders.
        """
        if self._echoed is None:
            self._state = state
        elif state is None:
            for loader in self._parts.values():
                loader.restart()
        else:
            self._load(state)

    def _load(self, state: dict[str, Any]) -> None:
        states = state["loaders"] if not is_state(state) and "loaders" in state else {"": state}
        if states.keys() != self._parts.keys():
            raise EchoStateError(
                f"the state is of {_said(states)}, here is {_said(self._parts)}: resume with the loaders that were echoed when it"
                " was saved, under the same names, or start anew without the state"
            )
        for name, loader in self._parts.items():
            self._ties.limit(loader)
            loader.load_state_dict(states[name])


def _said(loaders: Iterable[str]) -> str:
    """The names of loaders, for people."""
    return ", ".join(repr(name) for name in loaders) if set(loaders) != {""} else "a single loader"
