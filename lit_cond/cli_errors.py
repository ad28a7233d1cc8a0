"""One line for every mistake in a configuration or on the command line.

jsonargparse reports a bad value as a tree: one branch for every type the option could have had, each with the
reason why the value is not of that type. `explain` picks the branch that the user meant and adds the nearest
accepted word. A report it does not know is passed on as it is, shortened to its first lines.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from lit_cond.cli_report import (
    Complaint,
    Report,
    Vocabulary,
    class_arguments,
    flat_keys,
    hint_at,
    nearest,
    public_path,
    read_report,
    subclasses,
)

__all__ = ["explain"]

_MAX_CHOICES = 6
_MAX_SHOWN = 60
_WRONG_TYPE = r"^Expected a (?!path but)"  # the file name that every string could be is not meant
_CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")


def explain(message: str, vocabulary: Vocabulary, arguments: Sequence[str] = ()) -> str:
    """Shorten a report of jsonargparse.

    Args:
        message: The report.
        vocabulary: The accepted keys of the configuration.
        arguments: The command line, to find the configuration files.

    Returns:
        One line with the wrong word and the nearest right one.
    """
    report = read_report(message, vocabulary, arguments)
    for pattern, handler in _RULES:
        for complaint in report.complaints:
            match = re.search(pattern, complaint.text)
            if match is not None:
                return handler(complaint, match, report)
    return " ".join(line.strip() for line in message.splitlines()[:2])


def _unknown_key(word: str, report: Report) -> str:
    level, path = report.vocabulary, []
    parts = word.split(".")
    for part in parts:
        if part not in level:
            break
        path.append(part)
        level = level[part]
    wrong = parts[len(path)] if len(path) < len(parts) else parts[-1]
    where = f"{'.'.join(path)} has no option" if path else "there is no option"
    found = nearest(wrong, level)
    if found is None:
        elsewhere = [key for key in flat_keys(report.vocabulary) if key.rsplit(".", 1)[-1] == wrong]
        found = elsewhere[0] if elsewhere else None
        return f"{where} {wrong!r}" + (f"; did you mean {found!r}?" if found else hint_at(wrong, level))
    return f"{where} {wrong!r}; did you mean {'.'.join([*path, found])!r}?"


def _on_unknown_option(complaint: Complaint, match: re.Match[str], report: Report) -> str:
    word = match[1]
    if complaint.class_path is None:
        return _unknown_key(word, report)
    wrong = word.split(".")[0]
    known = class_arguments(complaint.class_path)
    if not known:  # a base class, taken because the class was not named
        found = nearest(wrong, _CLASS_KEYS)
        hint = f"did you mean {found!r}?" if found else "name the class with class_path, below it init_args"
        return f"{complaint.place}there is no option {wrong!r}; {hint}"
    name = complaint.class_path.rsplit(".", 1)[-1]
    return f"{complaint.place}{name} has no option {wrong!r}{hint_at(wrong, known)}"


def _on_unrecognized(complaint: Complaint, match: re.Match[str], report: Report) -> str:
    words = match[1].split()
    options = [word for word in words if word.startswith("--")]
    if not options:
        return f"{words[0]!r} is not expected here: options begin with --"
    return _unknown_key(options[0][2:].split("=")[0].rstrip("+"), report)


def _on_early_config(complaint: Complaint, match: re.Match[str], report: Report) -> str:
    word, command = match[1], match[2]
    if word.split(".")[0] in report.vocabulary:
        return f"{word!r} belongs to a command: put --config after {command}"
    return f"{word!r} is not accepted before the command {command}" + hint_at(word, [command])


def _on_unknown_class(complaint: Complaint, match: re.Match[str], report: Report) -> str:
    word = complaint.class_path or match[1]
    classes = {cls.__name__: cls for base in report.bases for cls in subclasses(base)}
    short = word.rsplit(".", 1)[-1]
    if short in classes:
        return f"{complaint.place}there is no {word!r}; did you mean '{public_path(classes[short])}'?"
    if len(classes) == 1 and nearest(short, classes) is None:
        return f"{complaint.place}expected the options of {next(iter(classes))} or null, got {_shown(word)}"
    return f"{complaint.place}there is no class {word!r}{hint_at(short, classes)}"


def _on_ambiguous_class(complaint: Complaint, match: re.Match[str], report: Report) -> str:
    return f"{complaint.place}{match[1]}"


def _on_wrong_class(complaint: Complaint, match: re.Match[str], report: Report) -> str:
    given = re.search(r"'class_path': '(.+?)'", report.value)
    word = given[1] if given else report.value
    return f"{complaint.place}{word!r} is not a {match[1]}"


def _on_wrong_type(complaint: Complaint, match: re.Match[str], report: Report) -> str:
    expected = [c for c in report.complaints if re.match(_WRONG_TYPE, c.text)]
    depth = max(len(c.keys) for c in expected)
    deepest = [c for c in expected if len(c.keys) == depth]
    keys = deepest[0].keys
    value = ""
    types: list[str] = []
    choices: list[str] = []
    for text in (c.text for c in report.complaints if c.keys == keys):
        if text.startswith("Given value: "):
            value = text.removeprefix("Given value: ")
        elif re.match(_WRONG_TYPE, text):
            kind, _, got = text.removeprefix("Expected a ").partition(". Got value: ")
            value = got or value
            literal = re.fullmatch(r"(?:typing\.)?Literal(\[.*\])", kind)
            if literal:
                choices += [str(choice) for choice in ast.literal_eval(literal[1])]
            else:
                types.append(_type_name(kind))
    wanted = [*(repr(choice) for choice in dict.fromkeys(choices)), *dict.fromkeys(types)]
    if "null" in wanted:
        wanted.append(wanted.pop(wanted.index("null")))
    value = _wrong_item(value, choices)
    found = nearest(value, choices)
    if found and len(wanted) > _MAX_CHOICES:
        return f"{deepest[0].place}{_shown(value)} is not accepted; did you mean {found!r}?"
    listed = ", ".join(wanted[:-1]) + " or " + wanted[-1] if len(wanted) > 1 else wanted[0]
    hint = f"; did you mean {found!r}?" if found else ""
    return f"{deepest[0].place}expected {listed}, got {_shown(value)}{hint}"


def _wrong_item(value: str, choices: Sequence[str]) -> str:
    """Pick from a list of words the first that is no choice."""
    if not value.startswith("["):
        return value
    try:
        items = [str(item) for item in ast.literal_eval(value)]
    except (ValueError, SyntaxError):
        return value
    return next((item for item in items if item not in choices), value)


def _type_name(kind: str) -> str:
    inner = re.fullmatch(r"<class '(.+)'>", kind)
    name = (inner[1] if inner else kind).rsplit(".", 1)[-1]
    return "null" if name == "NoneType" else name


def _on_class_value(complaint: Complaint, match: re.Match[str], report: Report) -> str:
    try:
        value = ast.literal_eval(report.value)
    except (ValueError, SyntaxError):
        value = report.value
    for key in value if isinstance(value, dict) else ():
        found = nearest(str(key), _CLASS_KEYS)
        if found and key not in _CLASS_KEYS:
            return f"{complaint.place}there is no option {key!r}; did you mean {found!r}?"
    concrete = [base for base in report.bases if base.__name__ == match[1] and class_arguments(public_path(base))]
    wanted = f"the options of {match[1]} or null" if concrete else f"class_path and init_args of a {match[1]}"
    return f"{complaint.place}expected {wanted}, got {_shown(report.value)}"


def _shown(value: str) -> str:
    return repr(value if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]}...")


def _on_broken_yaml(complaint: Complaint, match: re.Match[str], report: Report) -> str:
    for path in _config_files(report.arguments):
        try:
            _loaded(path)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else "?"
            return f"{path}, line {line}: {error.problem} ({error.context or 'not valid YAML'})"
        except (OSError, yaml.YAMLError):
            continue
    return f"not valid YAML: {' '.join(c.text for c in report.complaints)}"


def _on_empty_config(complaint: Complaint, match: re.Match[str], report: Report) -> str:
    files = [path for path in _config_files(report.arguments) if not isinstance(_loaded(path), dict)]
    name = str(files[0]) if files else "--config"
    found = f"found {_shown(match[1])}" if match[1].strip() else "it is empty"
    return f"{name}: expected lines of the form 'key: value', {found}"


def _loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def _config_files(arguments: Sequence[str]) -> list[Path]:
    joined = [word.partition("=")[2] for word in arguments if word.startswith(("--config=", "-c="))]
    apart = [after for word, after in pairwise(arguments) if word in ("--config", "-c")]
    return [path for path in map(Path, joined + apart) if path.is_file()]


def _on_missing_file(complaint: Complaint, match: re.Match[str], report: Report) -> str:
    path = Path(match[1])
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    found = nearest(path.name, siblings)
    hint = f"; did you mean {found!r}?" if found else ""
    return f"{complaint.place}there is no file {str(path)!r}{hint}"


def _on_invalid_choice(complaint: Complaint, match: re.Match[str], report: Report) -> str:
    word, choices = match[1], re.findall(r"\w+", match[2])
    return f"there is no command {word!r}{hint_at(word, choices)}"


def _on_required(complaint: Complaint, match: re.Match[str], report: Report) -> str:
    names = ", ".join(name.strip().split(".", 1)[-1] for name in match[1].split(","))
    return f"{names} is missing: give --config FILE, or name the class with --{names.split(',')[0]}"


_Handler = Callable[[Complaint, "re.Match[str]", Report], str]
_RULES: list[tuple[str, _Handler]] = [
    (r"^Problems parsing config", _on_broken_yaml),
    (r"^Unexpected config: ?(.*)", _on_empty_config),
    (r"^Option '(.+?)' is not accepted before subcommand '?(\w+)", _on_early_config),
    (r"(?:does not accept option|^Option) '(.+?)'", _on_unknown_option),
    (r"^unrecognized arguments: (.+)", _on_unrecognized),
    (r"^Expected a dot import path string: (.+)", _on_unknown_class),
    (r"^(Multiple subclasses with name .+)", _on_ambiguous_class),
    (r"^No module named '(.+?)'", _on_unknown_class),
    (r"^module '.+' has no attribute '(.+?)'", _on_unknown_class),
    (r"^Import path .*does not correspond to a subclass of (.+)", _on_wrong_class),
    (r"File does not exist: '(.+?)'", _on_missing_file),
    (r"invalid choice: '(.+?)' \(choose from (.+)\)", _on_invalid_choice),
    (r"^the following arguments are required: (.+)", _on_required),
    (r"^Not a valid subclass of (.+)", _on_class_value),
    (_WRONG_TYPE, _on_wrong_type),
]
