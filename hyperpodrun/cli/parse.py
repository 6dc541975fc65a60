"""From words and variables to settings: what the user gave, checked one by one, with its source.

click splits the command line by the table in `options`; the checks and the sentences are ours, the same for flags and variables.
Parsing stops at the script: it and everything after it are taken as they are, undecodable bytes (as surrogates) included.

A launcher started by a worker of another job finds that job's own HYPERPODRUN_JOB_ID, ..._NODE and so on in its environment. They
describe the outer job and are no options; HYPERPODRUN_GENERATION is the sign that this is so.
"""

from collections.abc import Mapping
from typing import TypeVar

import click
import msgspec
from click.core import ParameterSource

from hyperpodrun.agent.wire import names
from hyperpodrun.cli.kinds import BadValueError
from hyperpodrun.cli.options import BY_NAME, OPTIONS, Option
from hyperpodrun.cli.refusal import Refusal, nearest, quoted

USAGE = "hyperpodrun [options] script.py [script args]"
_SCRIPT = "script_and_arguments"
T = TypeVar("T")


class Setting(msgspec.Struct, frozen=True):
    """One value that the user gave; `source` is the flag or the variable it came from."""

    value: object
    text: str
    source: str


class CommandLine(msgspec.Struct, frozen=True):
    """The words split: texts of the options in the order given, and the script with its arguments."""

    given: dict[str, tuple[str, ...]]
    script: tuple[str, ...]


class Settings:
    """Checked values by option name. Reading one that was not given yields its default."""

    def __init__(self, given: Mapping[str, Setting]) -> None:
        self.given = dict(given)

    def source(self, name: str) -> str:
        """Flag or variable that set the option; only for options that were given."""
        return self.given[name].source

    def find(self, name: str, kind: type[T]) -> T | None:
        """The value, or the default, or None where there is neither."""
        setting, option = self.given.get(name), BY_NAME[name]
        if setting is not None:
            value = setting.value
        elif option.default is not None:
            value = option.kind.parse(option.default)
        else:
            return None
        if not isinstance(value, kind):
            raise TypeError(f"option {name} holds {type(value).__name__}, not {kind.__name__}")
        return value

    def get(self, name: str, kind: type[T]) -> T:
        """The value of an option that has a default."""
        value = self.find(name, kind)
        if value is None:
            raise TypeError(f"option {name} has no default")
        return value

    def on(self, name: str) -> bool:
        """Whether a switch is on."""
        return self.find(name, bool) is True


def with_dashes(name: str) -> str:
    """Option names are the same with dashes and underscores."""
    return name.replace("_", "-")


def _command() -> click.Command:
    parameters: list[click.Parameter] = [_parameter(option) for option in OPTIONS]
    parameters.append(click.Argument([_SCRIPT], nargs=-1, type=click.UNPROCESSED))
    return click.Command(
        "hyperpodrun",
        params=parameters,
        add_help_option=False,
        context_settings={"allow_interspersed_args": False, "token_normalize_func": with_dashes},
    )


def _parameter(option: Option) -> click.Option:
    declared = [option.name.replace("-", "_"), option.flag]
    if option.short:
        declared.append(option.short)
    if option.is_switch:
        return click.Option(declared, is_flag=True)
    return click.Option(declared, multiple=True, type=click.UNPROCESSED)


def split(words: list[str]) -> CommandLine:
    """Split the words after the program's name; raises Refusal for unknown options, missing and surplus values."""
    try:
        context = _command().make_context("hyperpodrun", list(words))
    except click.NoSuchOption as error:
        raise _unknown_option(error.option_name, words) from None
    except click.BadOptionUsage as error:
        raise _misused_option(error.option_name) from None
    given: dict[str, tuple[str, ...]] = {}
    for option in OPTIONS:
        key = option.name.replace("-", "_")
        if context.get_parameter_source(key) is not ParameterSource.COMMANDLINE:
            continue
        given[option.name] = ("1",) if option.is_switch else tuple(context.params[key])
    return CommandLine(given, tuple(context.params[_SCRIPT]))


def _unknown_option(name: str, words: list[str]) -> Refusal:
    typed = _as_typed(name, [word.partition("=")[0] for word in words])
    if not name.startswith("--") and typed != name and len(typed) > 2:
        # -nnodes and the like: one dash too few, or short options run together.
        meant = with_dashes(typed[1:])
        if meant in BY_NAME:
            return Refusal(f"no such option: {quoted(typed)}; did you mean --{meant}?")
        return Refusal(f"no such option: {name}, in {quoted(typed)}; see hyperpodrun --help")
    hint = nearest(with_dashes(typed).lstrip("-"), BY_NAME) if typed.startswith("--") else None
    advice = f"did you mean --{hint}?" if hint else "see hyperpodrun --help"
    return Refusal(f"no such option: {quoted(typed)}; {advice}")


def _as_typed(name: str, words: list[str]) -> str:
    """The word of the command line in which click met the name, which it gives with dashes and, when short, alone."""
    same = (word for word in words if with_dashes(word) == name)
    begun = (word for word in words if with_dashes(word).startswith(name))
    return next(same, None) or next(begun, name)


def _misused_option(name: str) -> Refusal:
    option = next(o for o in OPTIONS if name in (o.flag, o.short))
    if option.is_switch:
        return Refusal(f"{name} takes no value; write {name} alone, or leave it out")
    return Refusal(f"{name} needs a value, and nothing follows it; allowed: {option.kind.allowed}")


def settle(line: CommandLine, environment: Mapping[str, str]) -> Settings:
    """Check everything that was given; a flag beats HYPERPODRUN_<NAME>, which beats PET_<NAME>. Raises Refusal."""
    inside_a_worker = bool(environment.get(names.GENERATION))
    settings: dict[str, Setting] = {}
    for option in OPTIONS:
        texts = line.given.get(option.name)
        source = option.flag
        if texts is None:
            for variable in option.variables:
                text = environment.get(variable, "")
                if text and not (inside_a_worker and variable == names.JOB_ID):
                    texts, source = (text,), variable
                    break
        if texts is None or (option.empty_is_unset and not any(texts)):
            continue
        settings[option.name] = _checked(option, texts, source)
    return Settings(settings)


def _checked(option: Option, texts: tuple[str, ...], source: str) -> Setting:
    values = [_value(option, text, source) for text in texts]
    if not option.merges:
        return Setting(values[-1], texts[-1], source)
    pairs = {key: text for value in values if isinstance(value, dict) for key, text in value.items()}
    return Setting(pairs, ",".join(f"{key}={text}" for key, text in pairs.items()), source)


def _value(option: Option, text: str, source: str) -> object:
    looks_like_option = text.startswith("--") and with_dashes(text[2:].partition("=")[0]) in BY_NAME
    if looks_like_option and source == option.flag and not option.kind.may_look_like_an_option:
        reason = "another option stands where the value should be"
    else:
        try:
            return option.kind.parse(text)
        except BadValueError as error:
            reason = str(error)
    because = f" ({reason})" if reason else ""
    raise Refusal(f"{source}: {quoted(text)} is not allowed{because}; allowed: {option.kind.allowed}")
