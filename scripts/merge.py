"""Merge an adapter into the base it was trained on, check that nothing was lost, and publish the result.

    python scripts/merge.py --checkpoint runs/tiny-seed0 --output models/player
    python scripts/merge.py --checkpoint runs/default --output models/player --push me/player --dry-run

A 4-bit base is dequantised first: rounding to 4 bits again would lose a good part of the adapter. The merged model is
then loaded from disk and compared with the base and separate adapter: by the log-probabilities of the same decisions,
and by the same deals played greedily. Exit code 1 where the mean difference is larger than allowed.
"""

import argparse
import contextlib
import gc
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__":
    import config.start  # noqa: F401, before libraries load

import torch

from config.flags import FlagParser
from config.reader import ConfigError, blaming, printable, read_json, read_text
from curriculum import first_tasks
from envs.trace import check_config
from evaluation.players import MERGE_REPORT, WARM_START, WEIGHTS, as_played, find_adapter, run_config_file
from policy import load_policy
from policy.model import ON_CPU, LoraConfig, ModelConfig, identity, load_architecture, quietly, weights_digest
from scripts.export import publish
from scripts.export.proof import compare, observe, record_decisions, say
from training.config import load_sections
from training.memory import count_parameters
from training.process import ProgramError, at_least, must_be_writable, run_program
from utils import CheckpointError, check_base, fingerprint, naming, need_space, share, stays_in, sweep, write_file

SETTINGS = "adapter_config.json"
ROUNDING = {"float32": 1e-4, "float16": 0.01, "bfloat16": 0.02}  # nats a decision, allowed for arithmetic alone
# Servers sample by a model's generation_config.json, where bases leave out unlikely tokens.
AS_TRAINED: dict[str, Any] = {"do_sample": True, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
LOSS = 0.02  # share of the adapter's own effect that may be lost, where that is more
STATE = {"optimizer.safetensors", "past.safetensors"} | {  # files of a checkpoint that are of no use to others
    f"{name}.json" for name in ("trainer_state", "curriculum", "run_config", "manifest")
}


# --------------------------------------------------------------------------------------------------------- the merge


def load(config: SimpleNamespace, **model: Any) -> Any:
    """Load a run's policy, with changes to its model section."""
    lora = LoraConfig(r=1) if model.get("adapter", config.model.adapter) is None else config.lora
    return load_policy(SimpleNamespace(**vars(config) | {"model": replace(config.model, **model), "lora": lora}))


def write_merged(policy: Any, adapter: Path, output: Path, dtype: str) -> None:
    """Dequantise the policy's base, add the adapter and save the result. The policy is unusable afterwards."""
    from peft import PeftModel

    policy.forget()  # cached keys and values could leave no memory for the dequantised weights
    base = policy.peft_model.unload()
    if policy.config.use_4bit:
        base = base.dequantize(dtype=getattr(torch, dtype))
    merged = PeftModel.from_pretrained(base.to(getattr(torch, dtype)), adapter, **ON_CPU).merge_and_unload()
    merged.generation_config.update(eos_token_id=policy.chat.ends, temperature=policy.temperature, **AS_TRAINED)
    merged.save_pretrained(output, save_original_format=False)  # the original format of a 4-bit base is 4 bits
    policy.chat.save(output)
    share(output)


def merge(config: SimpleNamespace, adapter: Path, output: Path, dtype: str, count: int) -> dict[str, Any]:
    """Merge, load the result from disk and compare; return the report's ``proof`` and ``rounding``."""
    config = SimpleNamespace(**vars(config) | {"env": replace(config.env, env_mode="local")})  # for games and proof
    policy = load(config, adapter=str(adapter))
    check_base(str(adapter), identity(config.model, policy.base, policy.tokenizer))
    sequences = record_decisions(policy, config)
    before = observe(policy, config, sequences, count)
    base_M = policy.evaluate_decisions(sequences, adapter="base").logprobs.float().cpu()
    effect = float((before.logprobs_M - base_M).abs().mean())
    with naming(f"--output {output}: "):
        write_merged(policy, adapter, output, dtype)
    del policy
    gc.collect()
    torch.cuda.empty_cache()
    merged = load(config, model_name=str(output.absolute()), revision=None, adapter=None, use_4bit=False, dtype=dtype)
    after = observe(merged, config, sequences, count)
    kinds = {dtype, config.model.dtype}
    return {"proof": compare(before, after, effect), "rounding": max(ROUNDING[kind] for kind in kinds)}


# ----------------------------------------------------------------------------------------------------------- folders


def run_config(adapter: Path, base: str | None, sets: Sequence[str] = ()) -> SimpleNamespace:
    """The configuration the adapter was trained with, changed by ``sets``, on this machine's device and on ``base``."""
    config = load_sections([file := run_config_file(adapter)], sets, skip_unknown_sections=True)
    with blaming(f"{file}: ", AttributeError):
        held = read_json(file).get("model", {})
    for key in ("use_4bit", "use_nested_quant"):
        if held.get(key, now := getattr(config.model, key)) != now:
            raise ConfigError(f"--set: model.{key} was {str(held[key]).lower()} in the run, and has to stay: on other "
                              "weights the adapter is another player")  # fmt: skip
    device = "cuda" if torch.cuda.is_available() and config.model.device != "cpu" else "cpu"
    config.model = replace(config.model, device=device)
    if base and base != config.model.model_name:
        trained = printable(config.model.model_name)
        print(f"note: trained on {trained}, and --base says {base}: they must be the same weights")
        config.model = replace(config.model, model_name=base, revision=None)
    if config.env.env_type == "trace":
        check_config(replace(config.env, env_mode="local"), first_tasks(config.curriculum, "trace"))
    return config


def named_base(adapter: Path, config: SimpleNamespace, args: argparse.Namespace) -> ModelConfig:
    """The model section by which others find the base: the run's own, or of ``--base`` where that was a folder."""
    trained = run_config(adapter, None, args.set).model if args.base else config.model
    on_hub = publish.public_name(trained.model_name) == trained.model_name
    return replace(config.model, model_name=trained.model_name, revision=trained.revision) if on_hub else config.model


def finished(output: Path, made_of: dict[str, Any]) -> dict[str, Any] | None:
    """The report in ``output`` where that holds this very merge; None: it is new, empty, or was interrupted.

    ConfigError: ``output`` holds something else.
    """
    if not (output / MERGE_REPORT).is_file():
        _must_be_empty(output)
        return None
    report = read_json(output / MERGE_REPORT)
    if not isinstance(report, dict):
        damaged = f"its {MERGE_REPORT} is damaged; choose another directory or delete this one"
        raise ConfigError(f"--output {output}: {damaged}")
    same, interrupted = report.get("made_of") == made_of, report.get("interrupted")
    if interrupted and (same or [path.name for path in output.iterdir()] == [MERGE_REPORT]):
        return None  # of another merge only if that wrote nothing else
    if same and not interrupted and _is_whole(report, output):
        return report
    raise ConfigError(f"--output {output}: holds another merge, or this one with other files than it wrote; choose "
                      "another directory or delete this one")  # fmt: skip


def _files(output: Path) -> dict[str, Any]:
    """Size and SHA-256 of the merged model's files: weights, configuration and tokenizer."""
    files = [path for path in sorted(output.iterdir()) if path.is_file()]
    return {path.name: fingerprint(path) for path in files if path.name not in (MERGE_REPORT, "README.md")}


def _is_whole(report: dict[str, Any], output: Path) -> bool:
    """Whether the report's proof is complete and the files are still those that it is about."""
    with contextlib.suppress(ArithmeticError, KeyError, TypeError, ValueError):
        proof = report["proof"]
        complete = say(proof), proof["mean_difference"] <= report["rounding"], proof["effect"]  # else they raise
        present, recorded = _files(output), report["files"]
        added = {name for name in present.keys() - recorded.keys() if name.endswith(".safetensors")}
        return bool(complete) and not added and recorded.items() <= present.items()
    return False


def _must_be_empty(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {output}: is not empty; expected a directory that is new or empty")


def copy_adapter(adapter: Path, base: ModelConfig, output: Path) -> None:
    """Copy adapter, tokenizer, chat template and heads; ConfigError: ``output`` holds anything but these."""
    copied, folder = output / WEIGHTS, output.resolve()
    of_run = folder.name in ("final", "average") and any(folder.parent.glob("checkpoint-*"))
    if (folder / "manifest.json").exists() or of_run:
        raise ConfigError(f"--output {output}: belongs to a run; expected a directory that is new or empty")
    sweep(output, WEIGHTS)  # temporary files of a copy that was killed
    if not (copied.is_file() and copied.read_bytes() == (adapter / WEIGHTS).read_bytes()):
        _must_be_empty(output)
    public_base = {"base_model_name_or_path": publish.public_name(base.model_name), "revision": base.revision}
    settings = read_json(adapter / SETTINGS) | public_base
    must_be_writable(output)
    files = [path for path in adapter.iterdir() if path.is_file() and path.name not in {*STATE, SETTINGS, "README.md"}]
    if out := [path.name for path in files if not stays_in(adapter, path.name)]:
        raise ConfigError(f"--checkpoint {adapter}: {out[0]} is a link that leads out of it")
    with blaming("--output ", CheckpointError):
        need_space(output, sum(path.stat().st_size for path in files))
    for path in sorted(files, key=lambda path: path.name != WEIGHTS):  # first, since they let a second attempt in
        write_file(output / path.name, path.read_bytes())  # not its permissions: a checkpoint may be read-only
    write_file(output / SETTINGS, json.dumps(settings, indent=2, sort_keys=True).encode())


# ----------------------------------------------------------------------------------------------------------- program


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    rounding = ", ".join(f"{limit:g} in {dtype}" for dtype, limit in ROUNDING.items())
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="DIR", help="a checkpoint, or a run: its latest one")
    add("--output", "--output-dir", required=True, metavar="DIR", type=Path, help="a new folder")
    add("--base", metavar="B", help="another copy of the base (default: as in the run)")
    add("--set", nargs="+", default=[], metavar="KEY=VALUE", help="laid over the run's configuration")
    add("--dtype", choices=tuple(ROUNDING), help="of the merged weights (default: the run's)")
    add("--deals", type=at_least(1, 2**20), metavar="N", help="played before and after (default 200)")
    add("--tolerance", type=at_least(0.0), metavar="NATS", help="mean difference of log-probabilities "
        f"to allow (default: {rounding}; 2 %% of the adapter's effect if more)")  # fmt: skip
    add("--adapter-only", action="store_true", help="do not merge: a folder with the adapter alone")
    add("--push", metavar="OWNER/NAME", help="upload the folder to the Hub")
    add("--private", action="store_true", help="into a private repository; one that is public is refused")
    add("--dry-run", action="store_true", help="everything but the upload; list files, print the card")
    args = parser.parse_args(argv)
    if args.private and not args.push:
        parser.error("--private: of a repository; name it with --push OWNER/NAME")
    if args.adapter_only and (args.dtype or args.deals or args.tolerance is not None):
        parser.error("--adapter-only: nothing is merged or compared; leave out --dtype, --deals and --tolerance")
    args.deals = args.deals or 200
    return args


def make_merge(adapter: Path, config: SimpleNamespace, args: argparse.Namespace) -> dict[str, Any]:
    """Merge into the output folder, unless that was done before; return the report."""
    model, dtype = config.model, args.dtype or config.model.dtype
    made_of = {"base": publish.public_name(model.model_name), "base_weights": weights_digest(model.model_name),
               "revision": model.revision, "dtype": dtype,
               "dequantised": model.use_4bit, "deals": args.deals, "thinking": False,  # the chat template's default
               "adapter_sha256": fingerprint(adapter / WEIGHTS)["sha256"],
               "set_sha256": hashlib.sha256(json.dumps(args.set).encode()).hexdigest()}  # fmt: skip
    if (report := finished(args.output, made_of)) is not None:
        print(f"{args.output} holds this merge already")
        return report
    must_be_writable(args.output)
    weights = count_parameters(config.lora, load_architecture(model)).total
    with blaming("--output ", CheckpointError):
        need_space(args.output, weights * getattr(torch, dtype).itemsize)
    begun = {"made_of": made_of, "interrupted": True}  # stands until the merge is complete
    write_file(args.output / MERGE_REPORT, json.dumps(begun).encode())
    report = {"made_of": made_of, "played": as_played(config)} | merge(config, adapter, args.output, dtype, args.deals)
    report["files"] = _files(args.output)
    write_file(args.output / MERGE_REPORT, json.dumps(report, indent=1).encode())
    return report


def judge(report: dict[str, Any], args: argparse.Namespace) -> None:
    """Print how far the merged model differs; ProgramError where that is more than allowed."""
    proof = report["proof"]
    print(f"{args.output}: merged model against base and adapter apart: {say(proof)}")
    mean, effect, rounding = proof["mean_difference"], proof["effect"], report["rounding"]
    limit = max(rounding, LOSS * effect) if args.tolerance is None else args.tolerance
    if not mean <= limit:
        raise ProgramError(
            f"{args.output}: the merged model is not the one that was trained: log-probabilities differ by {mean:.2g} "
            f"nats on average, allowed are {limit:.2g}"
        )
    print(f"passed: {mean:.2g} nats on average, allowed are {limit:.2g}")
    if effect <= rounding:
        print(f"note: the adapter itself moves log-probabilities by {effect:.2g} nats only, no more than rounding may")


def finish(about: publish.Published, args: argparse.Namespace) -> None:
    """Write the card, check the folder, then upload or list it."""
    text, file = publish.card(about), args.output / "README.md"
    kept = read_text(file) if file.is_file() else None
    if kept is not None and not publish.is_unchanged(kept):
        text = kept
        print(f"{file} was edited and is kept; delete it to have it written anew")
    write_file(file, text.encode())
    publish.check_public(args.output)
    if args.dry_run:
        print(f"\n{about.repo} would hold" if args.push else f"\n{args.output} holds")
        for path in publish.published_files(args.output):
            print(f"{path.stat().st_size:>15,}  {printable(str(path.relative_to(args.output)))}")
        print(f"\nREADME.md:\n\n{printable(text)}")  # it tells what files of others say
    elif args.adapter_only and not args.push:
        print(f"{args.output}: the adapter, its tokenizer and a card")
    if args.push and (warning := publish.licence_warning(about.base, about.licence)):
        print(f"WARNING: {warning}", file=sys.stderr)
    if args.push and not args.dry_run:
        print(publish.upload(args.output, args.push, args.private))


def run(args: argparse.Namespace) -> None:
    """Merge and compare, or copy the adapter; write the card; upload."""
    if args.push:
        publish.check_repo(args.push)
        if not args.dry_run:
            print(f"uploading as {publish.who_uploads()}")
    adapter = find_adapter(args.checkpoint, allowed="a checkpoint and a run")
    config = own = run_config(adapter, args.base, args.set)
    with contextlib.suppress(ConfigError):  # some can be read with --set only
        own = load_sections([run_config_file(adapter)], skip_unknown_sections=True)
    file, base, report = adapter.parent / "summary.json", named_base(adapter, config, args), None
    summary = read_json(file) if file.is_file() else None
    if adapter.name == "final" and isinstance(summary, dict) and (made := adapter / "manifest.json").is_file():
        step = read_json(made).get("step")  # a resumed run replaces ``final`` before it evaluates it
        summary = summary if summary.get("steps", step) == step else None
    evaluated = {} if summary is None else publish.evaluated(summary, file, adapter.name)
    with blaming(f"{(warm := adapter / WARM_START)}: is no record of a warm start: ", (LookupError, TypeError)):
        teacher = printable(str(read_json(warm)["teacher"])) if warm.is_file() else None
    if args.adapter_only:
        copy_adapter(adapter, base, args.output)
    else:
        report = make_merge(adapter, config, args)
        judge(report, args)
    licence, config.model = publish.licence_of(base.model_name, base.revision), base
    name = args.push or args.output.resolve().name
    about = publish.Published(name, base.model_name, licence, config, adapter.name, summary, evaluated, report, teacher,
                              [item.partition("=")[0].strip() for item in args.set], own)  # fmt: skip
    finish(about, args)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; exit codes: 0 done, 1 the proof or the upload failed, 2 bad usage or configuration."""
    args = parse_args(argv)
    with quietly():
        return run_program(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
