"""``python -m lit_cond inspect``: the attention of a model and where its tokens enter, before anything is trained."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from lit_cond.errors import LitCondError
from lit_cond.inspection.as_json import add_numbers
from lit_cond.inspection.data import fit_to_model, read_data
from lit_cond.inspection.numbers import Numbers, measure_numbers
from lit_cond.inspection.table import format_numbers
from lit_cond.named_models import META_ABOVE, NamedModel, build_named
from lit_cond.surgery import TokenSite, find_token_sites
from lit_cond.surgery.samples import sampled_parts
from lit_cond.surgery.survey import Survey, survey_attention
from lit_cond.surgery.table import format_survey, survey_as_dict

__all__ = ["main"]

_DESCRIPTION = """\
Show the attention layers of a model, which rows of which parameters hold their query, key and value matrices, where
embedded tokens enter, how the matrices are conditioned, how widely the softmax looks, and what each correction would
make of both. Nothing is downloaded or trained; weights are random where the name brings none.

NAME_OR_PATH is one of
  timm/NAME, torchvision/NAME      a model of these libraries
  transformers/TYPE                a model type with its default configuration, such as transformers/bert
  NAME                             one of these names, looked up in timm, torchvision, transformers, in this order
  FOLDER, config.json              a model of Hugging Face on this machine
  FILE.ckpt, RUN_FOLDER            a checkpoint of Lightning that records its class, a run of `lit_cond fit`
  package.module:callable          a function or class of your own, called without arguments
"""

_EPILOG = """\
exit code: 0, also for a model without attention; 1 if something looks like attention and is not understood; 2 if the
model can not be found or built.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _fail(f"inspect: {message}; see python -m lit_cond inspect --help")


def main(arguments: Sequence[str]) -> None:
    """Run the command.

    Args:
        arguments: The words after ``inspect``.

    Raises:
        SystemExit: With code 1 if something was not understood, 2 and one line on stderr for what the user can repair.
    """
    parser = _Parser(
        prog="python -m lit_cond inspect",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME_OR_PATH")
    parser.add_argument(
        "--json",
        action="store_true",
        help='print JSON, every layer for itself; an infinite number is the text "inf", one that was not measured null',
    )
    parser.add_argument("--full", action="store_true", help="print every layer for itself")
    parser.add_argument(
        "--device",
        choices=("meta", "cpu"),
        help="meta: weights without values, so that no forward pass can be traced; the default for models of more than "
        f"{META_ABOVE // 10**6} million parameters",
    )
    parser.add_argument("--no-trace", action="store_true", help="ask the table of known layouts alone")
    parser.add_argument("--no-numbers", action="store_true", help="leave condition numbers and entropies out")
    parser.add_argument(
        "--data",
        metavar="FILE",
        type=Path,
        help="a batch that the model takes, for the attention entropy: what torch.save has written of a tensor, a "
        "tuple of arguments or a dictionary of them, or a .npy file; the model's own sample input when omitted",
    )
    options = parser.parse_args(arguments)
    if options.data is not None and (options.no_numbers or options.no_trace or options.device == "meta"):
        parser.error("--data needs a model with values: leave --no-numbers, --no-trace and --device meta out")
    try:
        understood = _inspect(options)
    except LitCondError as error:
        if os.environ.get("LIT_COND_TRACEBACK"):
            raise
        _fail(str(error))
    if not understood:
        raise SystemExit(1)


def _fail(text: str) -> NoReturn:
    print(f"lit_cond: error: {text}", file=sys.stderr)
    raise SystemExit(2)


def _inspect(options: argparse.Namespace) -> bool:
    data = None if options.data is None else read_data(options.data)
    named = build_named(options.name, options.device, values=not options.no_trace)
    # Without values there is nothing to run.
    model = named.model.to("meta") if options.no_trace else named.model
    if data is not None:
        data = fit_to_model(data, model, options.data)
    survey = survey_attention(model, trace=not options.no_trace)
    tokens = _tokens(model, survey)
    numbers = None if options.no_numbers else measure_numbers(model, survey, data, _known(tokens))
    if options.json:
        content = survey_as_dict(survey, tokens)
        if numbers is not None:
            content = add_numbers(content, survey, numbers)
        print(json.dumps({"model": _as_dict(named), **content}, indent=2, allow_nan=False))
    else:
        print("\n".join(_lines(named, survey, tokens, numbers, options)))
    return not survey.unknown


def _tokens(model: nn.Module, survey: Survey) -> Sequence[TokenSite] | LitCondError:
    if not survey.sites:
        return []
    try:
        return find_token_sites(model)
    except LitCondError as error:
        return error


def _known(tokens: Sequence[TokenSite] | LitCondError) -> Sequence[TokenSite]:
    return [] if isinstance(tokens, LitCondError) else tokens


def _as_dict(named: NamedModel) -> dict[str, Any]:
    cls = type(named.model)
    return {
        "name": named.name,
        "class": f"{cls.__module__}.{cls.__qualname__}",
        "parameters": named.parameters,
        "device": "meta" if named.is_meta else "cpu",
        "others": list(named.others),
    }


def _lines(
    named: NamedModel,
    survey: Survey,
    tokens: Sequence[TokenSite] | LitCondError,
    numbers: Numbers | None,
    options: argparse.Namespace,
) -> list[str]:
    lines = [f"{named.name}: {type(named.model).__name__}, {_millions(named.parameters)} parameters"]
    if named.others:
        lines.append(f"the name could also mean {' or '.join(named.others)}")
    if not (survey.sites or survey.unknown):
        lines.append("no attention: nothing here makes queries, keys and values for a softmax")
    text = format_survey(survey, tokens, full=options.full)
    lines += ["", text] if text else []
    measured = [] if numbers is None else format_numbers(survey, numbers, full=options.full)
    lines += ["", *measured] if measured else []
    advice = _advice(named, survey, options)
    return [*lines, *(["", *advice] if advice else [])]


def _advice(named: NamedModel, survey: Survey, options: argparse.Namespace) -> list[str]:
    """Return what would show more."""
    if options.no_trace or named.is_meta:
        more = "a forward pass shows layers that the table of layouts does not know: "
        if named.parameters > META_ABOVE:
            more += "inspect a config.json or a function of yours that makes a smaller model of the same kind"
        else:
            more += "use --device cpu without --no-trace"
        return [more] if survey.unknown else []
    if not survey.notes and next(sampled_parts(named.model), None) is None:
        return [
            "no forward pass was traced, since the model does not say what it takes: give it an example_input_array as "
            "LightningModules have, and what it computes decides"
        ]
    return []


def _millions(number: int) -> str:
    return f"{number / 1e9:.1f} billion" if number >= 1e9 else f"{number / 1e6:.1f} million"
