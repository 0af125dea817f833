"""Merging: nothing of the adapter is lost, the proof notices what is, and what is published gives nothing away."""

import json
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from tiny import base_model, micro_config, tiny_policy
from transformers import BitsAndBytesConfig, GenerationConfig

import utils
from config.reader import config_dict
from curriculum import CurriculumConfig, Stage
from envs.config import EnvConfig
from envs.types import Episode
from evaluation import measure as evaluation
from evaluation.players import Roster
from scripts import merge
from scripts.export import proof, publish
from training.process import ProgramError
from utils import ConfigError, read_json, save_checkpoint

WEIGHTS = "model.safetensors"
FOUR_BITS = {"use_4bit": True, "dtype": "bfloat16"}
QWEN_3B = "Qwen/Qwen2.5-3B-Instruct"


def make_run(folder, **model):
    """A run's folder with a checkpoint and a summary; its adapter is random."""
    policy, config = tiny_policy(folder, model=model), micro_config(folder, model=model)
    before = [r.row for r in evaluation.evaluate(policy, config.env, [200000000], 4)]
    save_checkpoint(folder / "run", 6, policy.save, documents={"run_config": config_dict(vars(config))}, tensors={})
    _, summary = evaluation.result_table(before, evaluation.evaluate(policy, config.env, [200000000], 4))
    (folder / "run" / "summary.json").write_text(json.dumps(summary | {"checkpoint": "checkpoint-000006"}))
    return folder / "run"


@pytest.fixture(scope="module")
def run_4bit(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run4"), **FOUR_BITS)


@pytest.fixture(scope="module")
def run_plain(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run32"))


def merge_in(folder, run, *arguments):
    deals = [] if "--adapter-only" in arguments else ["--deals", "8"]
    return merge.main(["--adapters", str(run), "--output", str(folder), *deals, *arguments])


@pytest.fixture(scope="module")
def merged_4bit(run_4bit, tmp_path_factory):
    folder = tmp_path_factory.mktemp("merged") / "player"
    assert merge_in(folder, run_4bit) == 0
    return folder


@pytest.fixture(autouse=True)
def _no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def logits(model):
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        return model.eval()(ids).logits.float().log_softmax(-1)


def quantised_base():
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from policy import model

    nested = model.ModelConfig().use_nested_quant
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=nested,
                                  bnb_4bit_compute_dtype=torch.bfloat16)  # fmt: skip
    base = AutoModelForCausalLM.from_pretrained(
        base_model(), dtype=torch.bfloat16, quantization_config=settings, device_map={"": "cpu"}
    )
    model.guard_4bit_on_cpu(base)
    return base


# ------------------------------------------------------------------------------------------------------ the weights


def test_the_merged_folder_is_a_plain_model_that_equals_base_and_adapter(run_4bit, merged_4bit):
    """Held against PEFT on the quantised base, and against what merging into quantised weights would have lost."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    adapted = PeftModel.from_pretrained(quantised_base(), run_4bit / "checkpoint-000006")
    merged = AutoModelForCausalLM.from_pretrained(merged_4bit)
    assert merged.dtype == torch.bfloat16
    assert not hasattr(merged.config, "quantization_config")
    expected, found = logits(adapted), logits(merged)
    with adapted.disable_adapter():
        effect = (logits(adapted) - expected).abs().mean()
    lost = (found - expected).abs().mean()
    assert lost < 0.05 * effect
    naive = logits(adapted.merge_and_unload())
    assert (naive - expected).abs().mean() > 5 * lost
    saved = AutoTokenizer.from_pretrained(run_4bit / "checkpoint-000006")
    assert AutoTokenizer.from_pretrained(merged_4bit).chat_template == saved.chat_template
    assert (merged_4bit / "generation_config.json").is_file()


def test_whoever_serves_a_merged_model_may_read_its_weights(merged_4bit):
    """Whoever may read the rest, as the umask has it: safetensors writes for their owner alone."""
    modes = {path.stat().st_mode for path in merged_4bit.iterdir()}
    assert modes == {(merged_4bit / "config.json").stat().st_mode}


def test_a_checkpoint_loads_with_plain_libraries(run_plain):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = run_plain / "checkpoint-000006"
    base = AutoModelForCausalLM.from_pretrained(base_model())
    plain = logits(base)
    adapted = logits(PeftModel.from_pretrained(base, folder))
    assert not torch.allclose(adapted, plain, atol=0.01)
    assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained(folder)), adapted, atol=1e-5)
    assert AutoTokenizer.from_pretrained(folder).chat_template


def test_the_report_proves_it(merged_4bit):
    report = read_json(merged_4bit / merge.MERGE_REPORT)
    found = report["proof"]
    assert found["mean_difference"] < 0.1 * found["effect"]
    assert found["mean_difference"] <= found["max_difference"]
    assert found["decisions"] >= 40
    assert found["deals"] == 8
    assert found["identical_moves"] > 0.8
    assert report["made_of"]["dequantised"]
    assert report["played"]["env"]["prompt"] == Roster([], [], 0, False, str(merged_4bit)).config(None).env.prompt


def test_a_folder_called_tilde_is_read_where_it_was_written(run_plain, tmp_path, monkeypatch):
    """As the home directory is not: another merge may lie there, and pass for this one."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "~").mkdir()
    assert merge_in("./~/player", run_plain) == 0
    assert (tmp_path / "~" / "player" / "merge_report.json").is_file()


def test_a_base_that_is_kept_in_4_bits_is_merged_as_any(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quantised_base().save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(base_model()).save_pretrained(tmp_path / "base")
    policy = tiny_policy(tmp_path, model={"model_name": str(tmp_path / "base")} | FOUR_BITS)
    policy.save(tmp_path / "adapter")
    expected = logits(policy.peft_model)
    merge.write_merged(policy, tmp_path / "adapter", tmp_path / "out", "bfloat16")
    merged, found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(found.values())
    assert not hasattr(merged.config, "quantization_config")
    assert (logits(merged) - expected).abs().mean() < 0.1


def test_a_merged_base_model_ends_its_turns(tmp_path):
    """Its own end, another than that of the chat template, would leave servers writing on."""
    folder = shutil.copytree(base_model(), tmp_path / "base")
    other = (generation := read_json(folder / "generation_config.json"))["pad_token_id"]
    (folder / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": other}))
    policy = tiny_policy(tmp_path, model={"model_name": str(folder)})
    policy.save(tmp_path / "adapter")
    merge.write_merged(policy, tmp_path / "adapter", tmp_path / "out", "float32")
    assert read_json(tmp_path / "out" / "generation_config.json")["eos_token_id"] == [policy.chat.end_id, other]


def test_a_merged_model_is_sampled_as_it_was_trained(tmp_path):
    """Servers sample by its generation_config.json: what bases leave out of their answers was part of training."""
    folder = shutil.copytree(base_model(), tmp_path / "base")
    generation = read_json(folder / "generation_config.json")
    odd = {"top_k": 20, "top_p": 0.8, "min_p": 0.1, "temperature": 0.6, "repetition_penalty": 1.1, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation | odd))
    policy = tiny_policy(tmp_path, model={"model_name": str(folder)}, ppo={"temperature": 0.7})
    policy.save(tmp_path / "adapter")
    merge.write_merged(policy, tmp_path / "adapter", tmp_path / "out", "float32")
    found = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (found.do_sample, found.temperature, found.top_p, found.top_k) == (True, 0.7, 1.0, 0)
    assert (found.min_p, found.repetition_penalty) == (None, 1.0)


def test_weights_may_be_saved_more_finely(run_plain, tmp_path):
    assert merge_in(tmp_path / "a", run_plain) == 0
    assert merge_in(tmp_path / "b", run_plain, "--dtype", "bfloat16") == 0
    fine, coarse = (read_json(tmp_path / name / merge.MERGE_REPORT) for name in "ab")
    assert fine["proof"]["max_difference"] < 1e-5
    assert fine["proof"]["identical_moves"] == 1.0
    assert 1e-4 < coarse["proof"]["mean_difference"] < 0.02
    assert (fine["rounding"], coarse["rounding"]) == (1e-4, 0.02)


# --------------------------------------------------------------------------------------------------------- the proof


def test_a_merge_that_loses_the_adapter_fails(run_plain, tmp_path, monkeypatch, capsys):
    def forget(policy, adapter, output, dtype):
        policy.peft_model.unload().save_pretrained(output)
        policy.tokenizer.save_pretrained(output)

    monkeypatch.setattr(merge, "write_merged", forget)
    assert merge_in(tmp_path / "out", run_plain) == 1
    error = capsys.readouterr().err
    assert "error: " in error
    assert "the merged model is not the one that was trained: log-probabilities differ by" in error
    assert not (tmp_path / "out" / "README.md").exists()
    found = read_json(tmp_path / "out" / merge.MERGE_REPORT)["proof"]
    assert found["mean_difference"] == pytest.approx(found["effect"], rel=1e-3)


def test_the_tolerance_can_be_stated(run_4bit, merged_4bit, tmp_path, capsys):
    shutil.copytree(merged_4bit, tmp_path / "out")
    assert merge_in(tmp_path / "out", run_4bit, "--tolerance", "1e-9") == 1
    assert "allowed are 1e-09" in capsys.readouterr().err
    assert merge_in(tmp_path / "out", run_4bit, "--tolerance", "0.5") == 0


def test_deals_are_replayed_greedily(run_plain):
    """The recorded games are sampled, and differ from seed to seed; the replays do not."""
    config = merge.run_config(run_plain / "checkpoint-000006", None)
    policy = merge.load(config, adapter=str(run_plain / "checkpoint-000006"))
    found = []
    for policy.seed in (0, 1):
        sequences = proof.record_decisions(policy, config)
        found.append(([s.ids for s in sequences], proof.observe(policy, config, sequences, 20).moves))
    assert found[0][0] != found[1][0]
    assert found[0][1] == found[1][1]


def played(logprobs, moves, scores):
    return proof.Played(torch.tensor(logprobs), moves, {"a": [{"score": score} for score in scores]})


def test_moves_count_up_to_the_first_that_differs():
    before = played([-1.0, -2.0], [["1", "2", "3"], ["4", "5"], ["6"], []], [1.0, 0.0, 0.5, 0.5])
    after = played([-1.5, -2.0], [["1", "9", "3", "4"], ["4", "5"], ["7"], []], [0.0, 0.0, None, 0.5])
    found = proof.compare(before, after, effect=2.0)
    assert (found["mean_difference"], found["max_difference"]) == (0.25, 0.5)
    assert (found["moves"], found["identical_moves"]) == (2 + 2 + 1, 3 / 5)
    assert found["value_difference"] == -1.0  # of -2 and 0; the pair of the deal that was lost is left out


def test_moves_that_a_game_which_broke_off_lacks_are_not_the_same():
    before, after = played([-1.0], [["1", "2", "3"], []], [1.0, 0.5]), played([-1.0], [["1"], []], [1.0, 0.5])
    found = proof.compare(before, after, effect=2.0)
    assert (found["moves"], found["identical_moves"]) == (2, 1 / 2)


def test_a_deal_that_failed_at_once_is_left_out_with_its_pair(run_plain, monkeypatch):
    """It had no game's name, so that the other model's deals had no partners, and the merge ended in a traceback."""
    config = merge.run_config(run_plain / "checkpoint-000006", None)
    policy = SimpleNamespace(evaluate_decisions=lambda _: SimpleNamespace(logprobs=torch.zeros(1)))
    failed, found = {"error": "a disk"}, []
    for first in (("unknown", 0.0, "failed", {}, failed), ("leduc_poker", 1.0, "finished")):

        def play(env_config, player, tasks, first=first):
            return [Episode(tasks[0], *first), *(Episode(task, "leduc_poker", 1.0, "finished") for task in tasks[1:])]

        monkeypatch.setattr(proof, "play", play)
        found.append(proof.observe(policy, config, [], 20))
    assert found[0].rows.keys() == found[1].rows.keys()
    assert proof.compare(*found, effect=1.0)["value_difference"] == 0.0


def test_a_proof_tells_no_mean_value_that_lacks_a_game():
    rows = {"0": [{"score": 0.5}] * 2, "1": [{"score": 1.0}] * 2, "2": [{"score": None}] * 2}
    before = proof.Played(torch.tensor([-1.0]), [["1"]], rows)
    found = proof.compare(before, before, effect=1.0)
    assert (found["value_difference"], found["value_interval"]) == (None, None)
    assert proof.say(found).endswith("are the same, and the mean value is not known, for all deals of a game failed.")
    whole = replace(before, rows=rows | {"2": rows["0"]})
    assert proof.compare(whole, whole, 1.0)["value_difference"] == 0.0


def test_all_deals_lost_is_no_proof():
    lost = played([-1.0], [["1"]], [None])
    with pytest.raises(proof.ProgramError, match="no deal was played to its end"):
        proof.compare(lost, lost, 1.0)


# ------------------------------------------------------------------------------------------------------- publishing


def test_dry_run_lists_the_files_and_the_card_without_secrets_and_paths(run_plain, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SOME_API_KEY", "hush-hush-12345")
    monkeypatch.setattr(publish, "QWEN_LICENCES", ((r".*", "qwen-research"),))
    monkeypatch.setattr(publish, "upload", lambda *_: pytest.fail("uploaded"))
    held = read_json(run_plain / "checkpoint-000006" / "run_config.json")
    held["curriculum"]["stages"][0]["name"] = "hush-hush-12345"
    places = {key: f"http://somebody-{key}" for key in ("env_url", "env_image", "vllm_base_url")}
    held["env"] |= places
    shutil.copytree(run_plain / "checkpoint-000006", tmp_path / "final")
    (tmp_path / "final" / "manifest.json").unlink()
    (tmp_path / "final" / "run_config.json").write_text(json.dumps(held))
    out = tmp_path / "out"
    assert merge_in(out, tmp_path / "final", "--push", "me/player", "--dry-run") == 0
    said = capsys.readouterr()
    files = sorted(path.name for path in out.iterdir())
    assert {"README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
            "tokenizer_config.json", "chat_template.jinja", "merge_report.json"} == set(files)  # fmt: skip
    assert all(name in said.out for name in files)
    assert "me/player would hold" in said.out
    assert "allows research only" in said.err
    assert "license_name: qwen-research" in said.out
    for path in out.iterdir():
        text = path.read_bytes().decode(errors="replace")
        for private in ("hush-hush-12345", *places.values(), str(tmp_path), base_model()):
            assert private not in text, path.name
    assert "[redacted]" in (out / "README.md").read_text()


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("README.md", "one\nsee {tmp}/notes", "line 2 holds a path of this machine"),
        ("README.md", "see /elsewhere/me/notes", "line 1 holds a path of this machine"),
        ("config.json", '{{"_name_or_path": "/home/somebody/models/base"}}', "line 1 holds a path of this machine"),
        ("notes/a.txt", "key hush-hush-12345", "holds a secret"),
    ],
)
def test_what_gives_something_away_is_not_published(tmp_path, monkeypatch, name, text, found):
    monkeypatch.setenv("SOME_API_KEY", "hush-hush-12345")
    monkeypatch.setattr(publish.Path, "home", lambda: publish.Path("/elsewhere/me"))
    file = tmp_path / "out" / name
    file.parent.mkdir(parents=True)
    (tmp_path / "out" / "tokenizer.json").write_text('{"/home/": 1}')  # words of the vocabulary are no paths
    publish.check_public(tmp_path / "out")
    file.write_text(text.format(tmp=tmp_path))
    with pytest.raises(publish.ProgramError, match=found):
        publish.check_public(tmp_path / "out")


class Hub:
    """Stands in for the Hub's client; ``held`` is in a repository that exists, which is public."""

    calls: list = []  # noqa: RUF012
    held: tuple = ()

    def whoami(self):
        return {"name": "me"}

    def create_repo(self, repo, **options):
        self.calls.append((repo, options))
        self.private = options["private"] and not self.held

    def model_info(self, repo):
        files = [SimpleNamespace(rfilename=name) for name in (".gitattributes", *self.held)]
        return SimpleNamespace(private=self.private, siblings=files)

    def upload_folder(self, repo_id, folder_path, commit_message):
        self.calls.append((repo_id, sorted(path.name for path in folder_path.iterdir())))
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}")


def test_push_uploads_the_folder(run_4bit, merged_4bit, monkeypatch, capsys):
    monkeypatch.setattr("scripts.export.publish.HfApi", Hub)
    monkeypatch.setattr(Hub, "calls", [])
    monkeypatch.setattr(merge, "merge", lambda *_: pytest.fail("merged once more"))
    assert merge_in(merged_4bit, run_4bit, "--push", "me/player", "--private") == 0
    assert Hub.calls[0] == ("me/player", {"private": True, "exist_ok": True})
    assert Hub.calls[1] == ("me/player", sorted(path.name for path in merged_4bit.iterdir()))
    assert "https://hub/me/player" in capsys.readouterr().out


def push_onto(held, folder, private, monkeypatch):
    monkeypatch.setattr("scripts.export.publish.HfApi", Hub)
    monkeypatch.setattr(Hub, "calls", [])
    monkeypatch.setattr(Hub, "held", held)
    return publish.upload(folder, "me/player", private)


def test_a_repository_that_is_public_is_not_taken_for_a_private_one(tmp_path, monkeypatch):
    """The Hub ignores ``private`` where the repository exists; False makes one public that would not be by default."""
    with pytest.raises(ProgramError, match=r"^--push me/player: exists already and is public"):
        push_onto(("README.md",), tmp_path, True, monkeypatch)
    assert len(Hub.calls) == 1, "nothing was uploaded"
    assert push_onto((), tmp_path, True, monkeypatch)
    assert push_onto(("README.md",), tmp_path, False, monkeypatch)
    assert Hub.calls[0] == ("me/player", {"private": None, "exist_ok": True})


def test_what_would_be_loaded_beside_the_model_is_not_left_there(tmp_path, monkeypatch):
    """transformers puts an adapter that was pushed first onto the merged model that came later."""
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("")
    others = ("adapter_config.json", "adapter_model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
    kept = ("README.md", "config.json", "model.safetensors", "notes.json", "onnx/config.json", "player.gguf")
    for other in others:
        with pytest.raises(ProgramError, match=rf"^--push me/player: holds files of another model; .*: {other}$"):
            push_onto((*kept, other), tmp_path, False, monkeypatch)
        assert len(Hub.calls) == 1, "nothing was uploaded"
    assert push_onto(kept, tmp_path, False, monkeypatch)


@pytest.mark.parametrize(("refused", "most"), [("whoami", 200), ("create_repo", 300)])
def test_a_secret_at_the_end_of_what_the_hub_says_is_not_cut_in_two(refused, most, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("x" * (most - 8) + " hf_token_that_is_long")

    monkeypatch.setattr("scripts.export.publish.HfApi", Hub)
    monkeypatch.setattr(Hub, refused, refuse)
    monkeypatch.setenv("HF_TOKEN", "hf_token_that_is_long")
    call = publish.who_uploads if refused == "whoami" else lambda: publish.upload(tmp_path, "me/player", False)
    with pytest.raises((publish.ConfigError, publish.ProgramError)) as told:
        call()
    assert "hf_" not in str(told.value)


def test_a_folder_that_gives_something_away_is_not_pushed(run_4bit, merged_4bit, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("scripts.export.publish.HfApi", Hub)
    monkeypatch.setattr(Hub, "calls", [])
    shutil.copytree(merged_4bit, tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("see /home/somebody/notes")
    assert merge_in(tmp_path / "out", run_4bit, "--push", "me/player") == 1
    assert "notes.txt: line 1 holds a path of this machine" in capsys.readouterr().err
    assert not Hub.calls


def test_without_access_nothing_is_merged(run_plain, tmp_path, monkeypatch, capsys):
    def refuse(self):
        raise OSError("no token")

    monkeypatch.setattr("huggingface_hub.HfApi.whoami", refuse)
    assert merge_in(tmp_path / "out", run_plain, "--push", "me/player") == 2
    assert "no access to the Hub (no token)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_a_link_in_a_checkpoint_leads_to_is_not_published(run_plain, tmp_path, capsys):
    """The manifest of somebody else's checkpoint does not name it."""
    (tmp_path / "id_ed25519").write_text("my key")
    checkpoint = shutil.copytree(run_plain / "checkpoint-000006", tmp_path / "checkpoint-000006")
    (checkpoint / "added_tokens.json").symlink_to("../id_ed25519")
    assert merge_in(tmp_path / "out", checkpoint, "--adapter-only") == 2
    assert "added_tokens.json is a link that leads out of it" in capsys.readouterr().err
    assert not (tmp_path / "out" / "added_tokens.json").exists()


def test_a_card_that_was_edited_is_kept(run_plain, tmp_path, capsys):
    out = tmp_path / "out"
    assert merge_in(out, run_plain, "--adapter-only") == 0
    file = out / "README.md"
    assert merge_in(out, run_plain, "--adapter-only", "--push", "me/other", "--dry-run") == 0
    assert "me/other" in file.read_text(), "one that nobody edited is written anew"
    assert "is kept" not in capsys.readouterr().out
    file.write_text(file.read_text().replace("## Training", "My own words.\n\n## Training"))
    for repo in ((), ("--push", "me/player", "--dry-run")):
        assert merge_in(out, run_plain, "--adapter-only", *repo) == 0
        assert "My own words." in file.read_text()
        assert f"{file} was edited and is kept; delete it" in capsys.readouterr().out


def test_a_card_in_a_checkpoint_is_not_taken_for_ones_own(run_plain, tmp_path, capsys):
    """A received one was copied, kept as an edit, and came back whenever it was deleted."""
    checkpoint = shutil.copytree(run_plain / "checkpoint-000006", tmp_path / "checkpoint-000006")
    (checkpoint / "README.md").write_text("Theirs.")
    assert merge_in(tmp_path / "out", checkpoint, "--adapter-only") == 0
    assert "Theirs." not in (tmp_path / "out" / "README.md").read_text()
    assert "was edited and is kept" not in capsys.readouterr().out


def test_a_card_is_shown_without_what_a_terminal_would_obey(run_plain, tmp_path, capsys):
    run = shutil.copytree(run_plain, tmp_path / "run")
    told = (run / "summary.json").read_text()
    (run / "summary.json").write_text(told.replace('"leduc_poker"', r'"\u001b]0;mine\u0007"'))
    (run / "checkpoint-000006" / "odd\x1b.txt").write_text("")
    assert merge_in(tmp_path / "out", run, "--adapter-only", "--dry-run") == 0
    shown = capsys.readouterr().out
    assert r"\x1b]0;mine\x07" in shown
    assert r"odd\x1b.txt" in shown
    assert shown.replace("\n", "").isprintable()


def test_another_base_is_noted_without_what_a_terminal_would_obey(tmp_path, capsys):
    config = config_dict(vars(micro_config(tmp_path)))
    config["model"]["model_name"] = "theirs\x1b[2J"
    (tmp_path / "run_config.json").write_text(json.dumps(config))
    merge.run_config(tmp_path, "mine")
    assert capsys.readouterr().out.startswith(r"note: trained on theirs\x1b[2J, and --base says mine")


def test_a_stored_value_out_of_range_is_corrected_on_the_command_line(tmp_path):
    config = config_dict(vars(micro_config(tmp_path)))
    config["curriculum"]["failure_replay_prob"] = 0.95  # as was allowed once
    (tmp_path / "run_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"failure_replay_prob = 0\.95: expected a number >= 0 and <= 0\.9"):
        merge.run_config(tmp_path, None)
    words = ["--checkpoint", "a", "--output", "b", "--set", "curriculum.failure_replay_prob=0.9"]
    sets = merge.parse_args(words).set
    assert merge.run_config(tmp_path, None, sets).curriculum.failure_replay_prob == 0.9


@pytest.mark.parametrize("key", ["use_4bit", "use_nested_quant"])
def test_an_adapter_is_not_merged_into_other_weights_than_it_was_trained_on(tmp_path, key):
    """Its own error for a missing bitsandbytes named the setting; the proof compared that other player with itself."""
    config = config_dict(vars(micro_config(tmp_path)))
    (tmp_path / "run_config.json").write_text(json.dumps(config))
    other = not config["model"][key]
    with pytest.raises(ConfigError, match=rf"^--set: model\.{key} was {str(not other).lower()} in the run"):
        merge.run_config(tmp_path, None, [f"model.{key}={str(other).lower()}"])
    assert merge.run_config(tmp_path, None, [f"model.{key}={str(not other).lower()}"])


def test_adapter_alone(run_plain, tmp_path, capsys):
    from safetensors.torch import load_file

    (run_plain / "checkpoint-000006" / "past.safetensors").write_bytes(b"as in self-play")
    out = tmp_path / "out"
    for _ in range(2):
        assert merge_in(out, run_plain, "--adapter-only", "--dry-run") == 0
    names = {path.name for path in out.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "README.md"} <= names
    (run_plain / "checkpoint-000006" / "past.safetensors").unlink()
    assert not names & {
        "past.safetensors",
        "optimizer.safetensors",
        "run_config.json",
        "manifest.json",
        "merge_report.json",
    }
    first, second = (load_file(f / "adapter_model.safetensors") for f in (out, run_plain / "checkpoint-000006"))
    assert all(torch.equal(first[name], second[name]) for name in second)
    assert base_model() not in (out / "adapter_config.json").read_text()
    card = (out / "README.md").read_text()
    assert "library_name: peft" in card
    assert "PeftModel.from_pretrained(model" in card


# ------------------------------------------------------------------------------------------------------------ cards


def about(folder, **changed):
    config = micro_config(folder)
    config.model = replace(config.model, model_name=changed.get("base", base_model()))
    held = {"repo": "me/player", "base": config.model.model_name, "licence": "apache-2.0", "config": config,
            "checkpoint": "checkpoint-000006", "summary": None, "report": None}  # fmt: skip
    held |= changed
    found = publish.evaluated(held["summary"] or {}, Path("summary.json"), held["checkpoint"])
    return publish.Published(**held, evaluated=found)


def test_card_tells_the_evaluation_with_intervals(run_4bit, merged_4bit):
    result = read_json(run_4bit / "summary.json")["games"]["leduc_poker"]
    text = (merged_4bit / "README.md").read_text()
    [shown] = ModelCard(text).data.eval_results
    assert (shown.dataset_name, shown.metric_value) == ("leduc_poker", pytest.approx(result["after"], abs=1e-4))
    card = " ".join(text.split())
    low, high = result["interval"]
    assert f"| leduc_poker | {result['before']:+.3f} | {result['after']:+.3f} | [{low:+.3f}, {high:+.3f}] |" in card


@pytest.mark.slow
def test_the_cards_snippet_runs_as_pasted(run_plain, merged_4bit, tmp_path):
    """Of the merged model and of the adapter alone; what it prints is a legal action of the position it shows."""
    assert merge_in(tmp_path / "adapter", run_plain, "--adapter-only") == 0
    for folder in (merged_4bit, tmp_path / "adapter"):
        text = (folder / "README.md").read_text()
        code = text.partition("```python\n")[2].partition("```")[0]
        base = f'"{publish.public_name(base_model())}"'
        for place in set(re.findall('pretrained\\((?:model, )?(".*?")', code)):  # the base, or the folder, once pushed
            code = code.replace(place, repr(base_model() if place == base else str(folder)))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        number, name = done.stdout.split()
        assert {"0": "Fold", "1": "Call", "2": "Raise"}[number] == name
        assert '"leduc_poker"' in code
        assert "Warning: it was trained and evaluated choosing among the legal ids only" in text


def test_the_revision_of_the_base_is_told_wherever_the_base_is(tmp_path):
    """In a checkpoint and in what is published of it; who names another base names no revision."""
    policy = tiny_policy(tmp_path, model={"revision": "0123abc"})
    policy.save(tmp_path / "adapter")
    assert read_json(tmp_path / "adapter" / "adapter_config.json")["revision"] == "0123abc"
    merge.copy_adapter(tmp_path / "adapter", replace(policy.config, revision="fed"), tmp_path / "copy")
    assert read_json(tmp_path / "copy" / "adapter_config.json")["revision"] == "fed"
    shown = about(tmp_path)
    for four in (True, False):
        shown.config.model = replace(shown.config.model, revision="0123abc", use_4bit=four)
        assert f'pretrained("{publish.public_name(base_model())}", revision="0123abc", dtype' in publish.card(shown)


@pytest.mark.parametrize("nested", [True, False])
def test_an_adapter_goes_on_the_base_in_the_bits_it_was_trained_on(tmp_path, nested):
    shown = about(tmp_path)
    shown.config.model = replace(shown.config.model, use_4bit=True, use_nested_quant=nested, dtype="bfloat16")
    card = publish.card(shown)
    names = {"BitsAndBytesConfig": BitsAndBytesConfig}
    exec(re.search(r"^bits = .*?^\)", card, re.MULTILINE | re.DOTALL)[0], names)
    bits = names["bits"]
    assert (bits.load_in_4bit, bits.bnb_4bit_quant_type, bits.bnb_4bit_use_double_quant) == (True, "nf4", nested)
    assert bits.bnb_4bit_compute_dtype == torch.bfloat16
    assert 'dtype="bfloat16", quantization_config=bits)' in card


def test_a_merged_model_is_loaded_as_it_is(merged_4bit):
    assert "BitsAndBytesConfig" not in (merged_4bit / "README.md").read_text()
    assert "which is not on the Hub" not in (merged_4bit / "README.md").read_text()


def test_what_games_have_read_takes_no_room_while_weights_are_merged(tmp_path, monkeypatch):
    policy = tiny_policy(tmp_path)
    store = policy.reader.store
    store.hold(store.take(10), -1)
    monkeypatch.setattr(policy.peft_model, "unload", lambda: 1 / len(store.layers[0][0]))
    with pytest.raises(ZeroDivisionError):
        merge.write_merged(policy, tmp_path, tmp_path / "out", "float32")


def test_a_card_holds_no_addresses_and_no_folders(tmp_path):
    config = micro_config(tmp_path)
    config.env = replace(config.env, trace={"source": str(tmp_path), "partial_credit": True})
    vars(config.env).update(dict.fromkeys(("env_url", "env_image", "vllm_base_url", "games_path"), "canary"))
    shown = publish.public_config(config)
    assert "canary" not in json.dumps(shown)
    assert shown["env"]["trace"] == {"source": tmp_path.name, "partial_credit": True}


@pytest.mark.parametrize(("mean", "passes"), [(0.19, True), (0.21, False)])
def test_a_merge_may_lose_a_fiftieth_of_what_the_adapter_does(mean, passes, capsys):
    proof = {"mean_difference": mean, "max_difference": 1.0, "effect": 10.0, "decisions": 9, "deals": 2,
             "identical_moves": 1.0, "moves": 9, "value_difference": 0.0, "value_interval": (0.0, 0.0)}  # fmt: skip
    args = SimpleNamespace(output="o", tolerance=None)
    with nullcontext() if passes else pytest.raises(ProgramError, match=r"0\.21 nats on average, allowed are 0\.2$"):
        merge.judge({"proof": proof, "rounding": 1e-4}, args)


@pytest.mark.parametrize("four_bits", [True, False])
def test_the_card_of_an_adapter_says_where_its_base_is_to_be_had(tmp_path, four_bits):
    local, needed = tmp_path / "mine", "which is not on the Hub: the folder of the base"
    local.mkdir()
    shown = about(tmp_path, base=str(local))
    shown.config.model = replace(shown.config.model, use_4bit=four_bits)
    assert f'# needs "mine" beside it, {needed}' in publish.card(shown)
    assert needed not in publish.card(replace(shown, base="Qwen/Qwen3-4B"))


@pytest.mark.parametrize(
    ("penalty", "told"),
    [
        ({"init_kl_coef": 0.0}, "none"),
        ({"init_kl_coef": 0.05, "target": 0.2, "adap_kl_ctrl": True}, "0.05 a nat at first, target 0.2 a decision"),
        ({"init_kl_coef": 0.05, "target": 0.2, "adap_kl_ctrl": False}, "0.05 a nat"),
    ],
)
def test_the_card_tells_the_kl_penalty_there_was(tmp_path, penalty, told):
    shown = about(tmp_path)
    shown.config.ppo = replace(shown.config.ppo, **penalty)
    assert f"\n| KL penalty | {told} |\n" in publish.card(shown)


def test_the_card_tells_how_free_play_ended(tmp_path):
    row = {"before": 0.0, "after": 0.5, "interval": [0.4, 0.6], "episodes": 8, "exact_after": None, "ceiling": None,
           "share": None, "free_play": {"value": 0.1, "legal_rate": 0.25}}  # fmt: skip
    summary = {"checkpoint": "checkpoint-000006", "games": {"leduc_poker": row}}
    for rate, told in ((0.25, "25%"), (0.996, "99.6%"), (1.0, "100%")):  # 99.6 % were told as all
        row["free_play"]["legal_rate"] = rate
        assert f"{told} of its answers in leduc_poker were legal" in publish.card(about(tmp_path, summary=summary))
    row["free_play"]["legal_rate"] = None  # of no answers
    assert "it may not play legally at all" in publish.card(about(tmp_path, summary=summary))
    assert publish.evaluated(summary, tmp_path / "summary.json", "checkpoint-000006") == summary["games"]
    assert "it may not play legally at all" in publish.card(about(tmp_path))


def test_each_game_of_a_card_has_a_value_of_its_own(tmp_path):
    row = {"before": 0.0, "interval": [-0.5, 0.5], "episodes": 8} | dict.fromkeys(("exact_after", "ceiling", "share"))
    games = {game: row | {"after": after} for game, after in (("leduc_poker", 0.1), ("tic_tac_toe", 0.2))}
    card = publish.card(about(tmp_path, summary={"checkpoint": "checkpoint-000006", "games": games}))
    assert "*share* is where the exact value, or with an interval that of sampled play (less luck where" in card
    told = {shown.dataset_name: shown.metric_value for shown in ModelCard(str(card)).data.eval_results}
    assert told == {"leduc_poker": 0.1, "tic_tac_toe": 0.2}


def test_a_card_has_no_columns_without_a_number(tmp_path):
    """Programs have no best response; failed games were left out."""
    row = {"before": 0.0, "after": 0.5, "interval": [0.4, 0.6], "episodes": 8, "failed": 0}
    row |= dict.fromkeys(("exact_after", "ceiling", "share"))
    summary = {"checkpoint": "checkpoint-000006", "games": {"leduc_poker": row}}
    heads = [["game", "before", "after", "95 %", "games"]]
    row2 = row | {"failed": 2, "ceiling": 0.9}
    heads.append([*heads[0], "best response", "failed"])
    for games, expected in zip(({"a": row}, {"a": row, "b": row2}), heads, strict=True):
        card = publish.card(about(tmp_path, summary=summary | {"games": games}))
        [head] = [line for line in card.splitlines() if line.startswith("| game")]
        assert [cell.strip() for cell in head.strip("|").split("|")] == expected
    assert re.search(r"^\| b .*\| +\+0\.900 +\| +2 +\|$", card, re.MULTILINE)


def test_the_card_shows_the_value_that_a_share_is_of(tmp_path):
    """Less luck, a share lay beside an ``after`` of which it was not; an exact value says more than either."""
    row = {"before": 0.0, "after": 0.3, "interval": [0.1, 0.5], "episodes": 40, "ceiling": 0.2, "share": 0.6}
    row |= {"adjusted": 0.12, "adjusted_interval": [0.1, 0.15], "exact_after": None, "share_interval": [0.5, 0.75]}
    games = {"a": row, "b": row | {"exact_after": 0.13, "share_interval": None}}
    card = publish.card(about(tmp_path, summary={"checkpoint": "checkpoint-000006", "games": games}))
    a, b = (re.sub(" +", " ", line) for line in card.splitlines() if re.match(r"\| [ab] ", line))
    assert "| 40 | +0.120 [+0.100, +0.150] | - | +0.200 | 0.600 [0.50, 0.75] |" in a
    assert "| 40 | - | +0.130 | +0.200 | 0.600 |" in b


def test_card_does_not_take_another_checkpoints_evaluation(tmp_path):
    card = publish.card(about(tmp_path, summary={"checkpoint": "checkpoint-000009", "games": {}}))
    assert "None of this checkpoint; its run was evaluated as checkpoint-000009." in card
    assert "The run holds none" in publish.card(about(tmp_path))


@pytest.mark.parametrize(
    ("base", "licence", "research_only"),
    [
        (QWEN_3B, "qwen-research", True),
        ("Qwen/Qwen2.5-3B", "qwen-research", True),
        ("Qwen/Qwen2.5-7B-Instruct", "apache-2.0", False),
        ("Qwen/Qwen2.5-72B-Instruct", "qwen", False),
        ("Qwen/Qwen3-4B", "apache-2.0", False),
        ("Qwen/Qwen3-0.6B", "apache-2.0", False),
    ],
)
def test_licences_of_qwens_own_bases(tmp_path, base, licence, research_only):
    assert publish.licence_of(base) == licence
    warning = publish.licence_warning(base, licence)
    assert bool(warning) == research_only
    card = publish.card(about(tmp_path, base=base, licence=licence))
    assert ("allows research only" in card) == research_only
    assert f"base_model: {base}" in card


def test_licence_of_a_local_base_is_read_from_its_card(tmp_path):
    assert publish.licence_of(str(tmp_path)) is None
    for odd in ("[mit, apache-2.0]", "3.0", "no"):
        (tmp_path / "README.md").write_text(f"---\nlicense: {odd}\n---\n")
        assert publish.licence_of(str(tmp_path)) is None
    (tmp_path / "README.md").write_text("---\nlicense: cc-by-nc-4.0\n---\n")
    assert publish.licence_of(str(tmp_path)) == "cc-by-nc-4.0"
    (tmp_path / "README.md").write_text('---\nlicense: "\\x1b[2Jresearch"\n---\n')
    assert publish.licence_of(str(tmp_path)) == r"\x1b[2Jresearch", "it is shown on terminals"
    assert "allows research only" in str(publish.licence_warning(str(tmp_path), "cc-by-nc-4.0"))
    assert "is not known here" in str(publish.licence_warning(str(tmp_path), None))


def test_front_matter_is_what_the_hub_reads(tmp_path):
    data = ModelCard(publish.card(about(tmp_path, base=QWEN_3B, licence="qwen-research"))).data.to_dict()
    assert (data["license"], data["license_name"], data["base_model"]) == ("other", "qwen-research", QWEN_3B)


# ------------------------------------------------------------------------------------------------------- bad usage


@pytest.mark.parametrize(("flags", "told"), [
    (["--private"], "--private: of a repository; name it with --push OWNER/NAME"),
    *[(["--adapter-only", *one], "--adapter-only: nothing is merged or compared; leave out --dtype, --deals and "
                                 "--tolerance") for one in (["--dtype", "float32"], ["--deals", "5"])],
])  # fmt: skip
def test_flags_that_would_do_nothing_are_refused(tmp_path, capsys, flags, told):
    with pytest.raises(SystemExit, match=r"^2$"):
        merge_in(tmp_path / "new", tmp_path, *flags)
    assert capsys.readouterr().err == f"error: {told}\n"


def test_bad_usage_is_told_in_one_line(run_plain, tmp_path, capsys):
    empty, full = tmp_path / "empty", tmp_path / "full"
    empty.mkdir()
    full.mkdir()
    (full / "mine.txt").write_text("")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "adapter_model.safetensors").write_bytes(b"")
    (bare / "adapter_config.json").write_text("{}")
    damaged = tmp_path / "damaged"
    shutil.copytree(run_plain / "checkpoint-000006", damaged)
    (damaged / "adapter_model.safetensors").write_bytes(b"")
    cases = [
        (tmp_path / "new", tmp_path / "nope", (), "no such directory; allowed are a checkpoint and a run"),
        (tmp_path / "new", empty, (), "there is no adapter_model.safetensors in"),
        (tmp_path / "new", bare, (), "there is no run_config.json in it or above it"),
        (tmp_path / "new", damaged, (), "adapter_model.safetensors: 0 bytes instead of"),
        (full, run_plain, (), "is not empty; expected a directory that is new or empty"),
        (full, run_plain, ("--adapter-only",), "is not empty; expected a directory that is new or empty"),
        (tmp_path / "new", run_plain, ("--push", "no spaces!", "--dry-run"), "--push no spaces!: "),
        (tmp_path / "new", run_plain, ("--push", "player", "--dry-run"), "expected OWNER/NAME"),
        (tmp_path / "new", run_plain, ("--base", str(tmp_path / "gone")), "there is no folder"),
    ]
    for output, run, arguments, expected in cases:
        capsys.readouterr()
        assert merge_in(output, run, *arguments) == 2, expected
        error = capsys.readouterr().err
        assert error.startswith("error: "), error
        assert expected in error, error
        assert error.count("\n") == 1, error


def final_of(run, folder):
    """The adapter of a run's end, which has no manifest, in a copy of the run."""
    shutil.copytree(run, folder / "run")
    (folder / "run" / "checkpoint-000006" / "manifest.json").unlink()
    return (folder / "run" / "checkpoint-000006").rename(folder / "run" / "final")


@pytest.mark.parametrize(("name", "content", "told"), [
    ("../summary.json", b"[1]", "summary.json: is no summary of a run"),
    ("../summary.json", b'{"games": {"hex": 1}}', "summary.json: is no summary of a run"),
    ("../summary.json", b'{"games": {"hex": {"after": 1}}}', "summary.json: is no summary of a run"),
    ("../summary.json", b'{"games": {"hex": {"before": 0, "after": "x", "interval": [0, 1], "episodes": 1, '
                        b'"exact_after": 0, "ceiling": 1, "share": 1}}}', "summary.json: is no summary of a run"),
    ("adapter_config.json", b"", "adapter_config.json: "),
    ("warmstart.json", b"[]", "warmstart.json: is no record of a warm start"),
    ("warmstart.json", b"{}", "warmstart.json: is no record of a warm start: 'teacher'"),
])  # fmt: skip
def test_damaged_files_beside_an_adapter_are_told_in_one_line(run_plain, tmp_path, capsys, name, content, told):
    final = final_of(run_plain, tmp_path)
    (final / name).resolve().write_bytes(content)
    for path in final.iterdir():
        path.chmod(0o444)
    assert merge_in(tmp_path / "out", final, "--adapter-only") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert told in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_run_whose_warm_start_is_gone_is_played_and_merged(run_plain, tmp_path):
    """As on another machine: it is only where training began."""
    final = final_of(run_plain, tmp_path)
    config = read_json(final / "run_config.json")
    config["model"]["adapter"] = str(tmp_path / "other" / "machine" / "warm")
    (final / "run_config.json").write_text(json.dumps(config))
    assert Roster([], [], 0, False, None).contestant(str(final)).label == "run/final"
    assert merge_in(tmp_path / "out", final) == 0


@pytest.mark.parametrize(("steps", "told"), [(3, False), (6, True)])
def test_the_table_of_an_earlier_end_is_not_in_the_card_of_a_run_that_went_on(run_plain, tmp_path, steps, told):
    """A run that goes on replaces ``final`` before it evaluates it."""
    shutil.copytree(run_plain, tmp_path / "run")
    (tmp_path / "run" / "checkpoint-000006").rename(tmp_path / "run" / "final")
    file = tmp_path / "run" / "summary.json"
    file.write_text(json.dumps(read_json(file) | {"steps": steps}))
    assert merge_in(tmp_path / "out", tmp_path / "run" / "final", "--adapter-only") == 0
    assert ("| leduc_poker |" in (tmp_path / "out" / "README.md").read_text()) == told


@pytest.mark.parametrize("name", [".", "../../best"])
def test_a_card_tells_the_same_however_the_checkpoint_is_named(run_plain, tmp_path, monkeypatch, name):
    """A dot and a link have no name of a checkpoint, and a link lies in no run: the card said "It is  of its run."."""
    final = final_of(run_plain, tmp_path)
    (tmp_path / "best").symlink_to(final)
    monkeypatch.chdir(final)
    assert merge_in(tmp_path / "out", name, "--adapter-only") == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "It is final of its run." in card
    assert "| leduc_poker |" in card


def test_a_player_on_another_disk_belongs_to_the_run_it_is_linked_from(run_plain, tmp_path):
    final = final_of(run_plain, tmp_path)
    (tmp_path / "disk").mkdir()
    final.rename(tmp_path / "disk" / "moved")
    final.symlink_to(tmp_path / "disk" / "moved")
    assert merge_in(tmp_path / "out", str(final), "--adapter-only") == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "It is final of its run." in card
    assert "| leduc_poker |" in card


@pytest.mark.parametrize("lost", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_copy_of_an_adapter_that_was_cut_short_is_made_whole_by_the_same_command(run_plain, tmp_path, lost):
    final, out = final_of(run_plain, tmp_path), tmp_path / "out"
    write = utils.write_file

    def cut_short(target, content):
        if target.name == lost:
            target.with_name(f".tmp-{lost}").write_bytes(b"killed")
            raise utils.CheckpointError(f"{target.name}: No space left on device")
        write(target, content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge, "write_file", cut_short)
        assert merge_in(out, final, "--adapter-only") == 2
    assert merge_in(out, final, "--adapter-only") == 0
    assert (out / lost).stat().st_size
    assert sorted(path.name for path in out.iterdir() if path.name.startswith(".")) == []


def test_a_card_is_written_whole_or_not_at_all(run_plain, tmp_path, monkeypatch):
    """Half of one would be taken for somebody's edit, kept, and uploaded."""
    final, out, write = final_of(run_plain, tmp_path), tmp_path / "out", Path.write_bytes

    def torn(path, data):
        if "README" in path.name:
            write(path, data[:100])
            raise OSError(28, "No space left on device")
        return write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", torn)
        patch.setattr(Path, "write_text", lambda path, text, **_: torn(path, text.encode()))
        assert merge_in(out, final, "--adapter-only") == 2
    assert not (out / "README.md").exists()


def test_a_summary_without_games_and_a_card_in_another_encoding(run_plain, tmp_path, capsys):
    final = final_of(run_plain, tmp_path)
    (final.parent / "summary.json").write_text('{"checkpoint": "checkpoint-000006"}')
    for path in final.iterdir():
        path.chmod(0o444)
    for _ in range(2):  # the copies may be written to, whatever the checkpoint's rights
        assert merge_in(tmp_path / "out", final, "--adapter-only") == 0
        assert all(path.stat().st_mode & 0o200 for path in (tmp_path / "out").iterdir())
    (tmp_path / "out" / "README.md").write_bytes(b"caf\xe9")
    assert merge_in(tmp_path / "out", final, "--adapter-only") == 2
    assert "README.md: is not UTF-8 text: " in capsys.readouterr().err.splitlines()[-1]


def test_a_base_of_the_repository_is_no_name_on_the_hub_from_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("policy.model.ROOT", tmp_path / "house")
    (tmp_path / "house" / "models" / "mine").mkdir(parents=True)
    monkeypatch.setattr(publish, "hf_hub_download", lambda *_, **__: pytest.fail("asked the Hub"))
    assert publish.public_name("models/mine") == "mine"
    assert publish.licence_of("models/mine") is None


def cut(folder):
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])


def without(key):
    def damage(folder):
        report = read_json(folder / merge.MERGE_REPORT)
        del report[key]
        (folder / merge.MERGE_REPORT).write_text(json.dumps(report))

    return damage


OTHERS = "holds another merge, or this one with other files than it wrote"
DAMAGE = {
    "cut": (cut, OTHERS), "gone": (lambda folder: (folder / "model.safetensors").unlink(), OTHERS),
    "no proof": (without("proof"), OTHERS),
    "no object": (lambda folder: (folder / merge.MERGE_REPORT).write_text("[]"), "its merge_report.json is damaged"),
    "no configuration": (lambda folder: (folder / "config.json").unlink(), OTHERS),
    "a space": (lambda folder: (folder / "config.json").write_text(f" {(folder / 'config.json').read_text()}"), OTHERS),
    "another tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}"), OTHERS),
    "more": (lambda folder: shutil.copy(folder / "model.safetensors", folder / "model-2.safetensors"), OTHERS),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "told"), DAMAGE.values(), ids=DAMAGE)
def test_a_merge_that_has_changed_since_is_not_passed(run_4bit, merged_4bit, tmp_path, capsys, damage, told):
    shutil.copytree(merged_4bit, tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    (tmp_path / "out" / ".cache").mkdir()
    assert merge_in(tmp_path / "out", run_4bit) == 0
    assert "holds this merge already" in capsys.readouterr().out
    damage(tmp_path / "out")
    assert merge_in(tmp_path / "out", run_4bit) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line == f"error: --output {tmp_path / 'out'}: {told}; choose another directory or delete this one"


@pytest.mark.parametrize("name", ["checkpoint-000006", "final"])
def test_an_adapter_is_not_copied_into_a_run(run_plain, tmp_path, capsys, name):
    shutil.copytree(run_plain, tmp_path / "run")
    shutil.copytree(run_plain / "checkpoint-000006", tmp_path / "run" / "final")
    (tmp_path / "run" / "final" / "manifest.json").unlink()  # as players have none
    before = {path: path.read_bytes() for path in (tmp_path / "run" / name).iterdir()}
    for source in (tmp_path / "run", tmp_path / "run" / "final"):
        assert merge_in(tmp_path / "run" / name, source, "--adapter-only") == 2
        assert "belongs to a run; expected a directory that is new or empty" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (tmp_path / "run" / name).iterdir()} == before


def test_a_merge_that_was_interrupted_is_made_again_by_the_same_command(run_plain, tmp_path, monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(merge, "compare", interrupted)  # the weights have been written
        assert merge_in(tmp_path / "out", run_plain) == 130
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert merge_in(tmp_path / "out", run_plain) == 0
    assert read_json(tmp_path / "out" / merge.MERGE_REPORT)["proof"]["identical_moves"] == 1.0
    assert "holds this merge already" not in capsys.readouterr().out


def test_an_attempt_that_wrote_nothing_is_in_nobodys_way(run_plain, tmp_path, capsys):
    assert merge_in(tmp_path / "out", run_plain, "--base", str(tmp_path / "none")) == 2
    assert merge_in(tmp_path / "out", run_plain) == 0


def test_another_adapter_of_the_same_base_is_another_merge(run_plain, tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    assert merge_in(tmp_path / "out", run_plain) == 0
    other = tmp_path / "other"
    shutil.copytree(run_plain / "checkpoint-000006", other)
    (other / "manifest.json").unlink()
    weights = {name: 2 * tensor for name, tensor in load_file(other / merge.WEIGHTS).items()}
    save_file(weights, other / merge.WEIGHTS)
    capsys.readouterr()
    assert merge_in(tmp_path / "out", other) == 2
    assert "holds another merge" in capsys.readouterr().err


def test_the_same_adapter_with_another_temperature_is_another_merge(run_plain, tmp_path, capsys):
    assert merge_in(tmp_path / "out", run_plain) == 0
    assert merge_in(tmp_path / "out", run_plain, "--set", "ppo.temperature=0.5") == 2
    assert "holds another merge" in capsys.readouterr().err


def test_the_same_adapter_on_other_weights_of_that_name_is_another_merge(run_plain, tmp_path, capsys):
    """A second try with the right base was told that it was done already."""
    from safetensors.torch import load_file, save_file

    right, wrong = (shutil.copytree(base_model(), tmp_path / place / "tiny") for place in "ab")
    weights = {name: tensor / 2 if "mlp" in name else tensor for name, tensor in load_file(wrong / WEIGHTS).items()}
    save_file(weights, wrong / WEIGHTS, metadata={"format": "pt"})
    assert merge_in(tmp_path / "out", run_plain, "--base", str(wrong)) == 0
    assert merge_in(tmp_path / "out", run_plain, "--base", str(right)) == 2
    assert "holds another merge" in capsys.readouterr().err


def test_weights_that_have_changed_under_their_name_are_not_merged_into(run_plain, tmp_path, capsys):
    """The proof would compare another player with itself, and pass."""
    player = shutil.copytree(run_plain / "checkpoint-000006", tmp_path / "player")
    (player / "manifest.json").unlink()
    utils.write_manifest(player, 6, {"model": base_model(), "weights": "others"})
    assert merge_in(tmp_path / "out", player) == 2
    assert f"the weights of {base_model()} are not those that it was trained with" in capsys.readouterr().err


def test_a_copy_of_the_base_is_called_by_the_bases_own_name(run_plain, tmp_path, capsys):
    """Its licence, which may allow research only, went with the name, and so did the revision."""
    copy = shutil.copytree(base_model(), tmp_path / "my-copy")
    trained = ["--set", f"model.model_name={QWEN_3B}", "model.revision=abc"]
    assert merge_in(tmp_path / "out", run_plain, "--adapter-only", "--base", str(copy), *trained) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert ModelCard(card).data.base_model == QWEN_3B
    assert "allows research only" in card
    assert 'revision="abc"' in card
    assert "my-copy" not in card
    settings = read_json(tmp_path / "out" / merge.SETTINGS)
    assert (settings["base_model_name_or_path"], settings["revision"]) == (QWEN_3B, "abc")
    assert merge_in(tmp_path / "of_folder", run_plain, "--adapter-only", "--base", str(copy)) == 0
    assert "my-copy" in (tmp_path / "of_folder" / "README.md").read_text(), "a folder of another name tells nobody more"
    for elsewhere in ("models/qwen", "./qwen", "~/m/qwen"):  # of the machine that trained it
        trained, out = ["--set", f"model.model_name={elsewhere}"], tmp_path / "elsewhere"
        assert merge_in(out, run_plain, "--adapter-only", "--base", str(copy), *trained) == 0
        assert read_json(out / merge.SETTINGS)["base_model_name_or_path"] == "my-copy"


def test_a_card_tells_what_was_changed_for_it_and_where_the_games_were_played(run_plain, tmp_path):
    """It said of a run on a server that it was local, and of a change that it was trained so."""
    changed = ["env.env_mode=url", "env.env_url=http://127.0.0.1:9", "env.prompt=full"]
    assert merge_in(tmp_path / "out", run_plain, "--adapter-only", "--set", *changed) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert '"env_mode": "url"' in card
    assert "| changed after training | env.env_mode, env.env_url, env.prompt |" in card
    assert "127.0.0.1" not in card
    longer = [*changed, "ppo.max_seq_length=2048"]
    assert merge_in(tmp_path / "merged", run_plain, "--set", *longer) == 0, "its proof is played here"
    assert merge_in(tmp_path / "plain", run_plain, "--adapter-only") == 0
    assert "changed after training" not in (tmp_path / "plain" / "README.md").read_text()


def test_a_card_tells_the_training_as_it_was(run_plain, tmp_path):
    """It told --set of the training, and showed the evaluation as one of the changed player."""
    changed = ["lora.r=9", "run.seed=7", "ppo.temperature=0.5", "env.answer_mode=free"]
    cards = []
    for out, sets in (("plain", []), ("changed", ["--set", *changed])):
        assert merge_in(tmp_path / out, run_plain, "--adapter-only", *sets) == 0
        cards.append((tmp_path / out / "README.md").read_text().replace(f"/{out}", ""))
    plain, card = cards
    told = "| changed after training | lora.r, run.seed, ppo.temperature, env.answer_mode |"
    training = re.compile(r"## Training\n.*?(?=\n\n<details>)", re.DOTALL)
    assert training.search(card)[0].splitlines() == [*training.search(plain)[0].splitlines(), told]
    assert "**Warning: it was trained and evaluated choosing among the legal ids only. Answering freely" in card
    assert "Everything, with these changes" in card
    assert '"temperature": 0.5' in card
    assert "Measured with the run's own settings, without the changes above. Mean value" in card
    assert (ModelCard(card).data.eval_results, len(ModelCard(plain).data.eval_results)) == (None, 1)
    assert "changes" not in plain


def test_a_card_of_a_run_that_is_read_with_set_only(run_plain, tmp_path):
    final = final_of(run_plain, tmp_path)
    held = read_json(final / "run_config.json")
    held["curriculum"]["failure_replay_prob"] = 0.95  # as was allowed once
    (final / "run_config.json").write_text(json.dumps(held))
    assert merge_in(tmp_path / "out", final, "--adapter-only", "--set", "curriculum.failure_replay_prob=0.9") == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| changed after training | curriculum.failure_replay_prob |" in card


def test_config_errors_of_the_base_name_the_key(run_plain):
    with pytest.raises(ConfigError, match="model_name"):
        merge.load(merge.run_config(run_plain / "checkpoint-000006", "./nothing/here"), adapter="x")


def test_the_proof_asks_for_different_programs(tmp_path):
    """The seed of a task chooses no row of a file: its id does."""
    config = micro_config(tmp_path)
    config.env = EnvConfig(env_type="trace", answer_mode="free")
    config.curriculum = CurriculumConfig([Stage("sums", [(0, 9999)])])
    [tasks] = proof.deals(config, 40, 1)
    assert len({task.task_id for task in tasks}) == 20  # each in both seats


def test_the_card_of_a_player_of_programs_names_no_opponent(tmp_path):
    known = {"before": 0.1, "after": 0.5, "interval": [0.4, 0.6], "episodes": 40}
    result = known | dict.fromkeys(("exact_after", "ceiling", "share"))
    played = about(tmp_path, summary={"games": {"trace_l0": result}}, checkpoint="final")
    played.config.env = EnvConfig(env_type="trace", answer_mode="free")
    played.config.curriculum = CurriculumConfig([Stage("sums", [(0, 0)])])
    before, _, evaluation = publish.card(played).partition("<details>")
    assert not re.search("random|against", before + evaluation.partition("</details>")[2])
    assert "Each user message is a program; the answer is what it prints." in before
    assert "legal actions" not in before
    assert "Python programs" in before
    played.config.model = replace(played.config.model, adapter="runs/warm")
    assert "It began as another adapter" in publish.card(played)
    taught = " ".join(publish.card(replace(played, teacher="cfr")).split())
    assert "No step of PPO was made in this, but it began as another adapter" in taught


def test_a_card_shows_no_program_of_ones_own(tmp_path):
    """The first one was published, and refused where it looked like a path of this machine."""
    (tmp_path / "a.jsonl").write_text(json.dumps({"program": "print('/var/log/mine.txt')"}))
    played = about(tmp_path)
    played.config.env = EnvConfig(env_type="trace", answer_mode="free", trace={"source": str(tmp_path / "a.jsonl")})
    played.config.curriculum = CurriculumConfig([Stage("mine", [(0, 0)])])
    card = publish.card(played)
    boards = replace(played.config.env, env_type="openspiel", answer_mode="constrained")
    other = about(tmp_path)
    other.config.env = boards
    shown = publish._example(other.config)
    other.config.env = replace(boards, trace={})
    assert publish._example(other.config) == shown, "which says nothing of its games"
    assert "mine.txt" not in card
    assert "print(" in card
    assert "do_sample=False, repetition_penalty=1.0)" in card, "as it was trained, whatever the base's default is"
