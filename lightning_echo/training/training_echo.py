"""`TrainingEcho`: echoes the training loader of a run, for `EchoDataModule` and for `EchoCallback`.

It stands between the Trainer, which asks for the training loader, and the user's ``train_dataloader``, which makes it:

* It wraps the user's loader, or the loaders of a collection (`Wrapping`), when the Trainer takes them into use. The user may call
  ``train_dataloader``, too, and gets plain loaders.
* It hands factor, place and counts on from one loader to the next.
* It reports a new length of epochs to the Trainer (`Reload`).

Each loader of a collection has its name (``loaders.py``); a single loader has the empty name, so both cases are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lightning_echo import config as options
from lightning_echo.config import EchoConfig
from lightning_echo.insertion import Needs, earliest
from lightning_echo.loader.loader import EchoLoader
from lightning_echo.loader.state import is_state
from lightning_echo.schema import EchoStateError, entry, state_of
from lightning_echo.training.hooks import BoundHooks, ProcessHook, TransferHooks
from lightning_echo.training.loaders import (
    Echoed,
    Wrapping,
    common_factor,
    echoed_in,
    is_combined,
    leaves_of,
    names_in_words,
    parts_of,
    with_leaves,
    write_journals,
)
from lightning_echo.training.package import MisconfigurationException
from lightning_echo.training.trainer import (
    Attached,
    Reload,
    StepsEstimate,
    TrainerLink,
    check_factor_during_training,
    forecast,
    rank_zero_info,
    too_short_schedules,
)

_NOTHING = object()


@dataclass
class _Answered:
    """The result of a ``train_dataloader``, and how much of it the Trainer has taken."""

    loaders: Any
    leaves: dict[str, Any]  # the user's loaders by name, in Lightning's order
    done: dict[str, Any] = field(default_factory=dict)  # the first of them, as the Trainer got them
    to_echo: list[str] = field(default_factory=list)  # names
    is_own_reload: bool = False  # the Trainer has asked only to learn the new length of epochs

    @property
    def next_name(self) -> str:
        return list(self.leaves)[len(self.done)]


def is_same_data(loader: Any, other: Any) -> bool:
    """Whether two loaders are the same, or Lightning has made one from the other to put in its own sampler.

    Lightning may ask for the loader again even if the user wants no reload, for example after its search for a learning rate.
    """
    if isinstance(loader, EchoLoader) or isinstance(other, EchoLoader):
        return loader is other
    return loader is other or getattr(loader, "dataset", loader) is getattr(other, "dataset", _NOTHING)


class TrainingEcho:
    """Echoes the training loader of a run.

    Args:
        config: The options of the `EchoLoader`. For a collection: the options of each loader to echo, by name.
        attached: Knows the Trainer, and is asked whenever the Trainer is needed.
        owner_name: The object that the user has, for messages. The user sets the factor there, and not on the loader.
        hint: The end of an error message for a user's loader that is already an `EchoLoader`. None: such a loader is taken as
            it is.
        shard: Whether each rank gets its share of the data.
    """

    def __init__(
        self,
        config: EchoConfig | Mapping[str, EchoConfig],
        attached: Attached,
        *,
        owner_name: str,
        hint: str | None = None,
        shard: bool = True,
    ) -> None:
        if not isinstance(shard, bool):
            raise TypeError(f"shard must be True or False, got {shard!r}")
        self._wrapping = Wrapping(config, owner_name, hint, shard)
        self.auto_may_be_demand = True  # False: with ``factor="auto"``, a controller of the user's decides
        self._said_of_auto = ""
        self._attached, self._owner_name = attached, owner_name
        self._reload, self._link, self._transfer_hooks = Reload(attached), TrainerLink(attached, owner_name), TransferHooks()
        # In the Trainer: an EchoLoader, or a collection with EchoLoaders. None before the Trainer has asked for it, and with
        # ``Trainer(overfit_batches=...)``.
        self.loader: Any = None
        self._echoed: Echoed | None = None  # its echoed part
        self._waiting_factor: float | None = None  # set, or in force, while there is no loader
        self._waiting_state: dict[str, Any] | None = None  # loaded while there is no loader
        self._log_directory_of: Callable[[Any], str | None] | None = None  # for journals; None: there are none
        self.gives_loader = False  # the Trainer of this fit has asked here for its loader, and got one that was wrapped here
        self.estimate = StepsEstimate()
        self._is_forecast_logged = self._is_schedule_warned = False
        self._process_hook = BoundHooks()
        self._take_passed: Callable[[Any], Any] | None = None
        self._answered: _Answered | None = None  # the last result of train_dataloader
        self._users: Any = None  # its result for the Trainer: the user's loaders that are in use

    @property
    def _parts(self) -> Mapping[str, EchoLoader]:
        return parts_of(self._echoed)

    # ------------------------------------------------------------------ factor

    @property
    def factors(self) -> dict[str, float]:
        """The echo factor that was set last, by the name of the loader."""
        if self._echoed is not None:
            return {name: loader.factor for name, loader in self._parts.items()}
        configs = self._wrapping.configs.items()
        return {name: config.first_factor if self._waiting_factor is None else self._waiting_factor for name, config in configs}

    @property
    def factor(self) -> float:
        """The echo factor that was set last; raises a MisconfigurationException if the loaders have different ones."""
        return common_factor(self.factors)

    @factor.setter
    def factor(self, value: float) -> None:
        self.set_factor(value)

    @property
    def factor_to_paste(self) -> str:
        """The factor that an `EchoLoader` of the user's needs to echo like this, as Python code."""
        written = {config.factor for config in self._wrapping.configs.values() if isinstance(config.factor, str)}
        if written == {options.AUTO_FACTOR} and any(part.on_demand for part in self._parts.values()):
            written = {options.DEMAND}
        return repr(max(written)) if written - {options.AUTO_FACTOR} else f"{max(self.factors.values()):g}"

    @property
    def auto_bound(self) -> float:
        """The largest factor that ``"auto"`` may choose where on demand is impossible: the same for all loaders."""
        return min(options.check_demand(options.DEMAND, config.max_factor)[1] for config in self._wrapping.configs.values())

    def set_factor(self, value: float, since: int | None = None) -> None:
        """Sets the factor of all loaders, from batch ``since`` of the run on; None: from the first batch not yet planned."""
        value = options.check_factor(value)
        if self._echoed is None:
            self._waiting_factor = value
            return
        if set(self.factors.values()) == {value}:
            return
        trainer = self._attached.trainer
        is_training = trainer is not None and trainer.training
        full_passes = [part for part in self._parts.values() if part.epoch_length == "full_pass" and is_training]
        if full_passes:
            check_factor_during_training(trainer, self._echoed, value)
            self.expect_factor(value)
        full_passes = [part for part in full_passes if part.has_length]  # else Lightning finds out where an epoch ends
        for loader in self._parts.values():
            loader.check_factor(value)  # all of them, before any is set
        if self.gives_loader:  # then the reload comes here, and is told the new length
            for loader in full_passes:
                loader.keep_length()
        for loader in self._parts.values():
            loader.set_factor(value, since)
        if full_passes:
            self._reload.order()

    def check_one_factor(self) -> None:
        """Raises a MisconfigurationException if factors differ: a controller sets one factor for all loaders."""
        common_factor(self.factors)

    def expect_factor(self, value: float) -> None:
        """Warns once if a factor, set during training, would make the run longer than the learning rate schedule expects."""
        if self._echoed is None or self._is_schedule_warned or not self.estimate.was_read:
            return
        if warning := too_short_schedules(self._attached.trainer, self._echoed, value):
            self._is_schedule_warned = True
            rank_zero_warn(f"lightning_echo: {warning}")

    # ------------------------------------------------------------------ loader

    def begin_fit(self, trainer: Any, take_passed: Callable[[Any], Any] | None = None) -> None:
        """Call this when a ``fit`` is set up, before its optimizers are configured.

        Until `end_fit`, the strategy's ``process_dataloader`` is ours. ``take_passed`` returns what the Trainer gets for a
        training loader that no ``train_dataloader`` has returned; None: the loader as it is.
        """
        self._is_schedule_warned = False
        self.estimate.begin_fit(trainer)
        self._process_hook.unbind()
        self._answered, self._take_passed = None, take_passed
        hook = ProcessHook(trainer.strategy.process_dataloader, self._process)
        self._process_hook.bind(trainer.strategy, "process_dataloader", hook.process_dataloader)

    def end_fit(self) -> None:
        """Restores the Trainer, and ends the workers. You may call it at any time."""
        self.end_own_reload()
        self._process_hook.unbind()
        self._answered = None
        self.close()

    def write_journals_in(self, log_directory_of: Callable[[Any], str | None]) -> None:
        """Lets runs on demand be written down in the log directory of their Trainer, which a function returns.

        All do so from their first batch on: Lightning fetches one before training starts if the length of an epoch is not known.
        """
        self._log_directory_of = log_directory_of

    def train_dataloader(self, ask_user: Callable[[], Any]) -> Any:
        """Returns the result of a ``train_dataloader``.

        During a ``fit`` these are the user's own loaders, since it may be the user who asks. When the Trainer asks, they come
        through its strategy's ``process_dataloader`` at once, loader by loader, and are echoed there (`_process`). Without a
        ``fit``, these are the echoed loaders.
        """
        if not self._process_hook.are_bound:
            users, ranks = ask_user(), self._wrapping.ranks(self._attached.trainer)
            return self._use_new(users, self._wrapping.wrap(users, self._parts, self._waiting_factor, ranks))
        users = self._users if self._reload.is_ordered and self._users is not None else ask_user()
        self._answered = _Answered(users, leaves_of(users))
        return with_leaves(users, self._answered.leaves) if is_combined(users) else users

    def _process(self, loader: Any) -> Any:
        """Returns what the strategy gets for a loader that the Trainer is about to use."""
        trainer, answered = self._attached.trainer, self._answered
        if trainer is None or not (trainer.training or trainer.sanity_checking):
            return loader
        is_next = answered is not None and len(answered.done) < len(answered.leaves)
        if answered is None or not is_next or not is_same_data(loader, answered.leaves[answered.next_name]):
            # The tuner sets validation loaders up in the stage of training, after those that it got from a train_dataloader.
            is_of_training = trainer.training and not (answered is not None and answered.done)
            return self._take_passed(loader) if self._take_passed is not None and is_of_training else loader
        if trainer.overfit_batches > 0:
            answered.done[answered.next_name] = loader
            return self._without_echo(loader)
        if not answered.done:
            answered.is_own_reload = self._begin_answer(trainer)
            answered.to_echo = self._wrapping.names_to_echo(answered.loaders, answered.leaves)
        name = answered.next_name
        if name in answered.to_echo:
            users = answered.leaves[name]
            # If Lightning has put no sampler of its own there, the user divides the data, or nobody does.
            ranks = self._wrapping.ranks(trainer, deals_out=loader is not users)
            loader = self._wrapping.echo(name, users, self._parts.get(name), self._waiting_factor, ranks)
        answered.done[name] = loader
        if len(answered.done) == len(answered.leaves):
            self._users = answered.loaders
            self._use_new(answered.loaders, self._wrapping.put_together(answered.loaders, answered.done))
            if answered.is_own_reload:
                self._order_reload_after_resuming()
        return loader

    def take_passed(self, loader: Any) -> Any:
        """Returns what the Trainer gets for a loader that was passed to ``fit``, whose data Lightning has divided, if at all."""
        trainer = self._attached.trainer
        is_own_reload = self._begin_answer(trainer)
        if self._echoed is not None and is_own_reload:  # only to give the Trainer the new length
            self._order_reload_after_resuming()
            return self.loader
        if trainer.overfit_batches > 0:
            return self._without_echo(loader)
        ranks = self._wrapping.ranks(trainer, deals_out=False)
        return self._use_new(loader, self._wrapping.wrap(loader, self._parts, self._waiting_factor, ranks))

    def _use_new(self, users: Any, loader: Any) -> Any:
        """Makes the user's loaders, echoed, the ones in use. With ``factor="auto"`` it is decided here how they echo."""
        if self._wrapping.is_auto and self.auto_may_be_demand:
            parts = parts_of(echoed_in(loader))
            said = self._wrapping.decide_auto(parts, leaves_of(users), self._parts)
            if said != self._said_of_auto:
                self._said_of_auto = said
                rank_zero_info(f"lightning_echo: {said}")
        return self.use(loader)

    def _begin_answer(self, trainer: Any) -> bool:
        """Notes that the Trainer asks for its loader. Returns whether it does so only to learn the new length."""
        self.gives_loader, is_own_reload = True, self.end_own_reload()
        self.estimate.loader_asked(trainer)
        for loader in self._parts.values():
            loader.release_length()
        return is_own_reload

    def _without_echo(self, loader: Any) -> Any:
        self.close()
        factors = set(self.factors.values())
        self._waiting_factor = factors.pop() if len(factors) == 1 else None
        self.loader = self._echoed = None
        rank_zero_info("lightning_echo: Trainer(overfit_batches=...) trains on the same few batches; echoing is off")
        return loader

    def adopt(self, loader: Any) -> None:
        """Takes over the `EchoLoader`, or the collection with `EchoLoader`s, that the Trainer already trains on."""
        self.gives_loader = False
        factor = self._waiting_factor
        for part in parts_of(echoed_in(loader)).values():
            has_fixed_length = part.epoch_length == "full_pass" and part.has_length and self._echoed is None
            if has_fixed_length and factor not in (None, part.factor):
                raise MisconfigurationException(
                    f"{self._owner_name} begins with factor {factor:g}, but the epoch's length is settled already: with "
                    f"epoch_length='full_pass' pass EchoLoader(loader, {factor:g}, ...) to fit"
                )
        self.use(loader)

    def is_in_use(self, loader: Any) -> bool:
        """Whether this is the loader in use. A new collection of Lightning's around the same loaders counts, too."""
        parts = parts_of(echoed_in(loader))
        return bool(parts) and parts.items() == self._parts.items()

    def use(self, loader: Any) -> Any:
        """Makes a loader the one in use, and returns it.

        The loader continues where the one before it stopped, or from a state that was loaded before there was a loader.
        """
        before, self.loader, self._echoed = self._parts, loader, echoed_in(loader)
        self._bind_transfer_hooks()
        for name, part in self._parts.items():
            self._link.connect(part, loader)
            earlier = before.get(name)
            if earlier is not None and earlier is not part:
                earlier.close()
                part.follow(earlier)
            elif not before and self._waiting_factor is not None:
                part.set_factor(self._waiting_factor)
            self._link.set_limit(part)
        for name, part in before.items():
            if name not in self._parts:
                part.close()
        if before and before.keys() != self._parts.keys():
            rank_zero_warn(
                f"lightning_echo: train_dataloader "
                f"returned {names_in_words(before)} before and returns {names_in_words(self._parts)} now: "
                "loaders with a name from before continue, the others begin from the start"
            )
        if self._waiting_state is not None:
            self._load(self._waiting_state)
            self._waiting_state = None
            self._order_reload_after_resuming()
        trainer = self._attached.trainer
        if trainer is not None and self._log_directory_of is not None and any(part.on_demand for part in self._parts.values()):
            write_journals(self._echoed, self._log_directory_of(trainer))
        if not self._is_forecast_logged and trainer is not None and self._echoed is not None:
            self._is_forecast_logged = True
            if line := forecast(trainer, self._echoed):
                rank_zero_info(f"lightning_echo: {line}")
        return loader

    def _bind_transfer_hooks(self) -> None:
        if isinstance(self._echoed, EchoLoader):
            self._transfer_hooks.bind(self._echoed, self._attached.trainer)
            return
        self._transfer_hooks.unbind()
        for name, part in self._parts.items():
            if part.insertion_point.on_device:
                raise MisconfigurationException(
                    f"{part.insertion_point.option} is impossible for the loader {name!r} of a collection, whose batches are "
                    f"transferred together: use '{earliest(Needs.batches)}' there, or return a single loader"
                )

    def close(self) -> None:
        """Ends workers and thread. A later epoch starts new ones, and continues where this one stopped."""
        self._transfer_hooks.unbind()
        for loader in self._parts.values():
            loader.close()

    def disconnect(self) -> None:
        """Ends the connection of loaders and Trainer, while there still is a Trainer. The loaders may be used elsewhere."""
        self._link.disconnect(self._parts.values())

    # ------------------------------------------------------------------ the length of epochs

    def _order_reload_after_resuming(self) -> None:
        """Orders a reload if a resumed epoch keeps its length, but the factor has changed since the epoch began."""
        if any(loader.has_kept_length for loader in self._parts.values()):
            self._reload.order()

    def end_own_reload(self) -> bool:
        """Restores the user's setting of reloads in the Trainer. Returns whether only this object ordered the reload."""
        return self._reload.end()

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any] | None:
        """Returns the state of the loader, or of a collection ``{"loaders": {name: state}}``; None if there is no loader yet."""
        # Lightning saves the loader's state, too, but loses it if the model reads ``trainer.estimated_stepping_batches``.
        if self._echoed is None:
            return self._waiting_state
        if isinstance(self._echoed, EchoLoader):
            return self._echoed.state_dict()
        return {"loaders": {name: loader.state_dict() for name, loader in self._parts.items()}}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continues from a state; None is the start of the run, saved before there was a loader."""
        if self._echoed is None:
            self._waiting_state = state
        elif state is None:
            for loader in self._parts.values():
                loader.restart()
        else:
            self._load(state)

    def _load(self, state: dict[str, Any]) -> None:
        with state_of(self._owner_name):
            several = entry(state, "loaders", dict | None, None)
        states = {"": state} if is_state(state) or several is None else several
        if states.keys() != self._parts.keys():
            raise EchoStateError(
                f"the state belongs to {names_in_words(states)}, but this run has {names_in_words(self._parts)}: resume with the "
                "loaders that were echoed when it was saved, under the same names, or restart without the state"
            )
        for name, loader in self._parts.items():
            self._link.set_limit(loader)
            loader.load_state_dict(states[name])
