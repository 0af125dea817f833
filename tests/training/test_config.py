"""Reading configuration: what is accepted, and one line for everything else."""

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manual import TABLES, manual

from config import synonyms
from config.flags import FlagParser
from config.reader import ConfigError, config_dict, config_diff, knob, load_config, read_json
from curriculum import CurriculumConfig, Stage, pool
from env_wrapper import EnvConfig
from games import CONFIGS_PER_GAME, NAMES
from training.config import parse_args

CONFIG = Path(__file__).parents[2] / "config"


@dataclass(frozen=True)
class Item:
    name: str
    weight: float = knob(1.0, min=0)


@dataclass(frozen=True)
class PPO:
    learning_rate: float = knob(1e-5, above=0, max=1)
    batch_size: int = knob(8, min=1)
    target_kl: float | None = knob(None, min=0)
    adap_kl_ctrl: bool = True
    modules: tuple[str, ...] = knob(("q", "v"), choices=("q", "k", "v"))

    def __post_init__(self):
        if self.batch_size % 2:
            raise ValueError(f"batch_size {self.batch_size} is not even")


@dataclass(frozen=True)
class Env:
    mode: str = knob("local", choices=("local", "url"))
    opponent: str | dict[str, float] = "random"
    ranges: tuple[str | tuple[int, int], ...] = ()
    items: tuple[Item, ...] = ()


SECTIONS = {"ppo": PPO, "env": Env}


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_later_files_and_sets_win_key_by_key(tmp_path):
    first = write(tmp_path / "a.json", '{"ppo": {"learning_rate": 1, "batch_size": 4}, "env": {"mode": "url"}}')
    second = write(tmp_path / "b.json", '{"ppo": {"batch_size": 6, "modules": ["k"]}}')
    config = load_config(SECTIONS, [first, second], ["ppo.target_kl=0.5", "env.opponent=mcts:50x1"])
    assert config["ppo"] == PPO(learning_rate=1.0, batch_size=6, target_kl=0.5, modules=("k",))
    assert type(config["ppo"].learning_rate) is float
    assert config["env"] == Env(mode="url", opponent="mcts:50x1")


def test_a_value_out_of_range_is_corrected_by_later_layers(tmp_path):
    """Of an old run's file, say, whose knob has been given a narrower range since."""
    first, second = (write(tmp_path / f"{n}.json", f'{{"ppo": {{"batch_size": {n}}}}}') for n in (-2, 6))
    with pytest.raises(ConfigError, match=r"-2.json: ppo.batch_size = -2: expected"):
        load_config(SECTIONS, [first], ["ppo.learning_rate=1"])
    assert load_config(SECTIONS, [first, second])["ppo"].batch_size == 6
    assert load_config(SECTIONS, [first], ["ppo.batch_size=4"])["ppo"].batch_size == 4
    with pytest.raises(ConfigError, match=r"--set: ppo.batch_size = 0"):
        load_config(SECTIONS, [second], ["ppo.batch_size=0"])


def test_text_of_digits_is_text_where_text_is_wanted(options):
    """As a year that names a folder, or seven digits that begin a revision."""
    config = load_config(options.SECTIONS, options.DEFAULT_FILES, ["run.output_dir=2026", "model.revision=7064982"])
    assert (config["run"].output_dir, config["model"].revision) == ("2026", "7064982")
    with pytest.raises(ConfigError, match=r"env.env_mode = 3: expected one of"):
        load_config(options.SECTIONS, options.DEFAULT_FILES, ["env.env_mode=3"])
    with pytest.raises(ConfigError, match=r"model.use_4bit = 1: expected true or false"):
        load_config(options.SECTIONS, options.DEFAULT_FILES, ["model.use_4bit=1"])


READ_AS = {
    "lr=1": ("ppo.learning_rate", 1.0),
    "ppo.lr=1": ("ppo.learning_rate", 1.0),
    "env.batch-size=4": ("ppo.batch_size", 4),
    "training.learning_rate=1": ("ppo.learning_rate", 1.0),
    "mode=url": ("env.mode", "url"),
}


@pytest.mark.parametrize("item", READ_AS)
def test_a_key_whose_meaning_is_plain_is_taken_and_told(caplog, item):
    caplog.set_level("INFO")
    path, value = READ_AS[item]
    section, _, key = path.partition(".")
    assert getattr(load_config(SECTIONS, sets=[item])[section], key) == value
    assert [record.getMessage() for record in caplog.records] == [f"--set: {item.partition('=')[0]} is read as {path}"]


def test_a_flat_file_is_told_in_one_line(tmp_path, caplog):
    caplog.set_level("INFO")
    file = write(tmp_path / "env.json", '{"mode": "url", "lr": 1, "ppo": {"batch_size": 4}}')
    config = load_config(SECTIONS, [file])
    assert (config["env"], config["ppo"]) == (Env(mode="url"), PPO(learning_rate=1.0, batch_size=4))
    assert caplog.messages == [f"{file}: mode is read as env.mode, lr is read as ppo.learning_rate"]


def test_every_synonym_is_of_a_key_that_exists_and_hides_none(options):
    known = {name: set(key_paths(cls)) for name, cls in TABLES.items()}
    assert set(synonyms.KEYS.values()) <= set().union(*known.values())
    assert not set(synonyms.KEYS) & set().union(*(known[name] for name in options.SECTIONS))


def test_a_file_of_many_keys_is_read_in_its_length(tmp_path):
    """Each key against all others would take hours for the largest file that is read."""
    keys = ",".join(f'"{i}": 0' for i in range(200_000))
    (tmp_path / "a.json").write_text(f'{{{keys}, "7": 1}}')
    started = time.monotonic()
    with pytest.raises(ConfigError, match='the key "7" stands twice in one object'):
        read_json(tmp_path / "a.json")
    assert time.monotonic() - started < 10


def test_nested_values_become_their_types():
    sets = ['env.ranges=["go", [1, 2]]', 'env.items=[{"name": "a"}, {"name": "b", "weight": 2}]', "env.opponent={}"]
    env = load_config(SECTIONS, sets=sets)["env"]
    assert env == Env(ranges=("go", (1, 2)), items=(Item("a"), Item("b", 2.0)), opponent={})


def test_resolved_configuration_reads_back_equal(tmp_path):
    config = load_config(SECTIONS, sets=["env.ranges=[[1, 2]]", 'env.items=[{"name": "a"}]', "ppo.learning_rate=3e-7"])
    file = write(tmp_path / "run_config.json", json.dumps(config_dict(config)))
    assert load_config(SECTIONS, [file]) == config


def test_part_of_a_configuration(tmp_path):
    file = write(tmp_path / "run_config.json", '{"ppo": {"batch_size": 2}, "other": {"x": 1}}')
    assert load_config({"ppo": PPO}, [file], skip_unknown_sections=True)["ppo"].batch_size == 2
    with pytest.raises(ConfigError, match=r"other = .*no such key"):
        load_config({"ppo": PPO}, [file])


BROKEN_SETS = {
    "ppo.batch_size=0": "--set: ppo.batch_size = 0: expected an integer >= 1",
    "ppo.batch_size=8.0": "--set: ppo.batch_size = 8.0: expected an integer >= 1",
    "ppo.batch_size=true": "--set: ppo.batch_size = true: expected an integer >= 1",
    "ppo.batch_size=many": '--set: ppo.batch_size = "many": expected an integer >= 1',
    "ppo.batch_size=3": "ppo: batch_size 3 is not even",
    "ppo.batch_sise=8": "--set: ppo.batch_sise = 8: no such key; the nearest is ppo.batch_size",
    "ppo.loss=8": "--set: ppo.loss = 8: no such key; docs/configuration.md lists them",
    f"ppo{'.x' * 2000}=8": "--set: ppo.x = {'x.x.x.x.x.x....x.x.x.x.x.x.x': 8}: no such key; "
    "docs/configuration.md lists them",
    "total_timesteps=8": "--set: total_timesteps = 8: no such key; "
    "a run plays ppo.num_train_steps * ppo.batch_size games",
    "ppo.progression_threshold=1": "--set: ppo.progression_threshold = 1: no such key; "
    "a stage has it: curriculum.stages, a list of objects",
    'ppo={"lr": 1, "learning_rate": 1}': "--set: ppo.learning_rate is given twice: as ppo.lr and ppo.learning_rate",
    "ppo.learning_rate=0": "--set: ppo.learning_rate = 0: expected a number > 0 and <= 1",
    "ppo.learning_rate=2": "--set: ppo.learning_rate = 2: expected a number > 0 and <= 1",
    "ppo.learning_rate=NaN": '--set: ppo.learning_rate: "NaN" is not allowed: numbers are finite',
    "ppo.learning_rate=-Infinity": '--set: ppo.learning_rate: "-Infinity" is not allowed: numbers are finite',
    "ppo.learning_rate=1e999": '--set: ppo.learning_rate: "1e999" is not allowed: numbers are finite',
    "ppo.learning_rate=null": "--set: ppo.learning_rate = null: expected a number > 0 and <= 1",
    "ppo.target_kl=-1": "--set: ppo.target_kl = -1: expected a number >= 0 or null",
    "ppo.adap_kl_ctrl=1": "--set: ppo.adap_kl_ctrl = 1: expected true or false",
    'ppo.modules=["q", "x"]': '--set: ppo.modules[1] = "x": expected one of "q", "k", "v"',
    "ppo.modules=q,x": '--set: ppo.modules[1] = "x": expected one of "q", "k", "v"',
    "ppo.modules=3": '--set: ppo.modules[0] = 3: expected one of "q", "k", "v"',
    "env.mode=docker": '--set: env.mode = "docker": expected one of "local", "url"',
    'env.opponent={"random": "x"}': '--set: env.opponent.random = "x": expected a number',
    "env.ranges=[[1]]": "--set: env.ranges[0] = [1]: expected a string or a list of [an integer, an integer]",
    "env.items=[{}]": "--set: env.items[0].name is missing: expected a string",
    'env.items=[{"name": "a", "wieght": 1}]': (
        "--set: env.items[0].wieght = 1: no such key; the nearest is env.items[0].weight"
    ),
    'env.items=[{"name": "a", "weight": -1}]': "--set: env.items[0].weight = -1: expected a number >= 0",
    "env.items=[7]": "--set: env.items[0] = 7: expected an object with the keys name, weight",
    "env.items.0.weight=2": "--set: env.items = {'0.weight': 2}: "
    "expected a list of (an object with the keys name, weight)",
    "env.items=[{name: a}]": '--set: env.items: invalid JSON in line 1, at "name: a}]": '
    "Expecting property name enclosed in double quotes; write it between single quotes",
    "env.opponent={random:1}": '--set: env.opponent: invalid JSON in line 1, at "random:1}": '
    "Expecting property name enclosed in double quotes; write it between single quotes",
    "ppo=3": "--set: ppo = 3: expected an object with the keys "
    "learning_rate, batch_size, target_kl, adap_kl_ctrl, modules",
    "ppo.batch_size": '--set: expected KEY.PATH=VALUE without spaces, not "ppo.batch_size"',
    "tic_tac_toe": '--set: expected KEY.PATH=VALUE without spaces, not "tic_tac_toe"; a list is written a,b',
    'ppo={"batch_size": 2, "batch_size": 4}': '--set: ppo: the key "batch_size" stands twice in one object',
}


@pytest.mark.parametrize("item", BROKEN_SETS)
def test_broken_set(item):
    with pytest.raises(ConfigError) as error:
        load_config(SECTIONS, sets=[item])
    assert str(error.value) == BROKEN_SETS[item]


BROKEN_FILES = {
    b'{"ppo": {"batch_size": 8,\n "learning_rate": }}': 'invalid JSON in line 2, at "}}": Expecting value',
    b'{"ppo": {"batch_size": 8, "batch_size": 8}}': 'the key "batch_size" stands twice in one object',
    b'{"ppo": {"learning_rate": NaN}}': '"NaN" is not allowed: numbers are finite',
    b'{"ppo": {"batch_size": -2}}': "ppo.batch_size = -2: expected an integer >= 1",
    b'{"pop": {"batch_size": 2}}': "pop = {'batch_size': 2}: no such key; the nearest is ppo",
    b'{"": 1}': '"" = 1: no such key; docs/configuration.md lists them',
    b"[]": "expected an object with the keys ppo, env",
    b"": "invalid JSON in line 1, at the end: Expecting value",
    b"\xff\xfe{": "is not UTF-8 text: invalid start byte at byte 0",
    b'{"env": {"opponent": "a\\u0000b"}}': r'env.opponent = "a\u0000b": expected a string or an object of (a number)',
    '{"lä\u202eufe": {}}'.encode(): r'"lä\u202eufe" = {}: no such key; docs/configuration.md lists them',
    b'{"env": {"opponent": "a\\ud800b"}}': r'env.opponent = "a\ud800b": expected a string or an object of (a number)',
    b"[" * 100_000: "invalid JSON: nested too deeply",
    b'{"env": {"trace": {"source": %s%s}}}' % (b"[" * 200, b"]" * 200): "invalid JSON: nested too deeply",
    b'{"ppo": {"batch_size": ' + b"9" * 5000 + b"}}": "invalid JSON: a number too long",
}


@pytest.mark.parametrize("text", BROKEN_FILES, ids=range(len(BROKEN_FILES)))
def test_broken_file_is_named_with_the_mistake(tmp_path, text):
    file = tmp_path / "broken.json"
    file.write_bytes(text)
    with pytest.raises(ConfigError) as error:
        load_config(SECTIONS, [file])
    assert str(error.value) == f"{file}: {BROKEN_FILES[text]}"


def test_words_that_are_no_text_are_told_before_anything_is_done(capsys):
    """A folder of that name could be made, and its checkpoints not be written."""
    with pytest.raises(SystemExit) as ended:
        FlagParser().parse_args(["runs/caf\udce9"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: runs/caf?: is not UTF-8 text\n"


@pytest.mark.parametrize(("words", "told"), [
    (["--run", ""], "--run: an empty value; is a variable of the shell not set?"),
    (["--run="], "--run=: an empty value; is a variable of the shell not set?"),
    (["--run", "LOOP/run"], "LOOP/run: Too many levels of symbolic links"), (["--run=LOOP"], "LOOP: Too many levels"),
    (["--size", "a\nb"], "argument --size: invalid int value: 'a\\nb'"), (["--size", "9\n 8"], "argument --size: inv"),
    (["x\ny"], "unrecognized arguments: x y"),
])  # fmt: skip
def test_words_that_name_nothing_are_told_in_a_line(tmp_path, capsys, words, told):
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    parser = FlagParser()
    parser.add_argument("--run")
    parser.add_argument("--size", type=int)
    with pytest.raises(SystemExit) as ended:
        parser.parse_args([word.replace("LOOP", str(loop)) for word in words])
    line = capsys.readouterr().err
    assert (ended.value.code, line.count("\n")) == (2, 1)
    assert line.startswith(f"error: {told.replace('LOOP', str(loop))}")


def test_a_flag_that_is_a_setting_is_told_how_to_give_it(capsys):
    parser = FlagParser()
    parser.add_argument("--set", nargs="+")
    parser.add_argument("--config")
    setting, file = "; --set KEY=VALUE changes settings", "; --config FILE names a file of settings"
    preset = f"; --config {CONFIG / 'presets' / 'tiny.json'} is the preset"
    for typed, more in [
        (["--lr=1e-3"], setting), (["ppo.lr=1e-3"], setting), (["p/tiny.json"], file), (["tiny"], preset),
        (["runs/x"], ""),
    ]:  # fmt: skip
        with pytest.raises(SystemExit, match="2"):
            parser.parse_args(typed)
        assert capsys.readouterr().err == f"error: unrecognized arguments: {typed[0]}{more}\n"


@pytest.mark.parametrize("typed", ["--checkpoint", "--run", "--adapters"])
def test_what_is_to_be_read_is_not_taken_for_where_to_write(capsys, typed):
    with pytest.raises(SystemExit, match="2"):
        parse_args([typed, "runs/x"], "")
    assert capsys.readouterr().err.startswith(f"error: unrecognized arguments: {typed};")
    assert parse_args(["--checkpoint_dir", "runs/x"], "").output_dir == "runs/x"


def test_names_in_a_list_may_have_commas():
    parser = FlagParser()
    parser.add_argument("--games", nargs="+")
    parser.add_argument("--run", nargs="+")
    read = parser.parse_args(["--games", "hex,ttt", "go,", "--games", "chess", "--run", "a,b"])
    assert (read.games, read.run) == (["hex", "ttt", "go", "chess"], ["a,b"])
    assert parser.parse_args(["--games", ","]).games == [","]  # refused by whoever looks the name up


def test_a_message_keeps_both_ends_of_what_it_quotes(capsys):
    with pytest.raises(SystemExit):
        FlagParser().parse_args(["--" + "9" * 5000 + "z"])
    line = capsys.readouterr().err
    assert len(line) < 1100
    assert line.startswith("error: unrecognized arguments: --999")
    assert line.endswith("99z\n")


def test_a_tilde_is_the_home_directory_wherever_a_shell_leaves_it(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    parser = FlagParser()
    for flag in ("--output", "--config"):
        parser.add_argument(flag, nargs="*")
    read = parser.parse_args(["--output=~/x", "--config", "~", "a~b", "--config", "~/y", "c=~/z"])
    assert (read.output, read.config) == (["/home/somebody/x"], ["/home/somebody", "a~b", "/home/somebody/y", "c=~/z"])


def test_a_value_that_ends_in_an_equals_sign_is_no_empty_one():
    """``--set=env.opponent=`` is the stages' own opponent."""
    parser = FlagParser()
    parser.add_argument("--set", nargs="+")
    assert parser.parse_args(["--set=env.opponent=", "--set", "a=", "b="]).set == ["env.opponent=", "a=", "b="]


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(ConfigError, match=r"no\.json: cannot be read: No such file"):
        read_json(tmp_path / "no.json")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_json(tmp_path)


def test_byte_order_mark_is_accepted(tmp_path):
    file = tmp_path / "windows.json"
    file.write_bytes(b'\xef\xbb\xbf{"ppo": {}}')
    assert read_json(file) == {"ppo": {}}


def test_diff_names_each_key():
    old = {"ppo": {"gamma": 0.99, "gone": None, "same": [1]}}
    new = {"ppo": {"gamma": 1.0, "same": [1]}, "run": {"seed": 1}}
    assert config_diff(old, new) == ["ppo.gamma: 0.99 -> 1.0", "ppo.gone: null -> null", "run: null -> {'seed': 1}"]
    assert config_diff(old, old) == []


def test_diff_of_stages_shows_what_differs():
    """Both begin alike, and only their beginning was shown."""
    old = {"stages": [{"games": [[0, 10**9]] * 9, "name": "a"}, {"games": ["go"], "name": "b"}]}
    new = {"stages": [{"games": [[0, 10**9]] * 9, "name": "c"}, {"games": ["hex"], "name": "b"}]}
    [line] = config_diff(old, new)
    assert line == """stages: [0].name: "a" -> "c", [1].games: ['go'] -> ['hex']"""
    assert config_diff(old, {"stages": []})[0].startswith("stages: [{'games'")


def key_paths(cls):
    return [field.name for field in dataclasses.fields(cls)]


REAL = {"env": EnvConfig, "curriculum": CurriculumConfig, "ppo": PPO, "own": Env}
KEYS = [*REAL, *(key for cls in REAL.values() for key in key_paths(cls)), "name", "games", "opponent", "threshold"]
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.sampled_from(["random", "mcts", "go"])
)
keys = st.one_of(st.sampled_from(KEYS), st.text(max_size=5))
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4), max_leaves=12
)
stages = st.fixed_dictionaries({"name": scalars, "games": st.lists(values, max_size=2)}, optional={"opponent": values})
documents = st.one_of(
    values,
    st.dictionaries(st.sampled_from(sorted(REAL)), st.dictionaries(keys, values, max_size=4), max_size=3),
    st.fixed_dictionaries({"curriculum": st.fixed_dictionaries({"stages": st.lists(stages, max_size=2)})}),
)


def only_one_line_errors(files=(), sets=()):
    message = ""
    try:
        load_config(REAL, files, sets)
    except ConfigError as error:
        message = str(error)
    assert message.isprintable()
    assert len(message) < 1000


def test_what_a_terminal_would_obey_is_told_in_letters():
    with pytest.raises(ConfigError, match=r"games_path: /tmp/\\x1b\[2J\\n is not a folder"):
        load_config(REAL, [], ["own.games_path=/tmp/\x1b[2J\n"])


@settings(max_examples=300, deadline=None)
@given(documents)
def test_any_json_gives_a_configuration_or_one_line(tmp_path_factory, document):
    file = write(tmp_path_factory.getbasetemp() / "fuzz.json", json.dumps(document))
    only_one_line_errors([file])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_damage_to_a_shipped_file_gives_a_configuration_or_one_line(tmp_path_factory, data):
    text = bytearray((CONFIG / "curriculum_config.json").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    file = tmp_path_factory.getbasetemp() / "damaged.json"
    file.write_bytes(text)
    only_one_line_errors([file])


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(max_size=30), st.builds(lambda key, value: f"own.{key}={value}", keys, st.text(max_size=20))))
def test_any_set_gives_a_configuration_or_one_line(item):
    only_one_line_errors(sets=[item])


# ------------------------------------------------------------------------------------------- the files in config/


@pytest.fixture(scope="module")
def options():
    from training import config as options  # here, because it imports torch

    return options


def test_default_files_list_every_knob_with_its_default(options):
    """A new knob, or another default, must be seen here: in the file that users read."""
    shipped: dict = {}
    for name in options.DEFAULT_FILES:
        shipped |= read_json(CONFIG.parent / name)
    stages = shipped.pop("curriculum")
    assert set(stages) == set(key_paths(CurriculumConfig))
    defaults = {name: cls() for name, cls in options.SECTIONS.items() if name != "curriculum"}
    # Called as a library, play opens all games of a call; a training run has to bound what the policy keeps.
    defaults["env"] = dataclasses.replace(defaults["env"], games_at_once=8)
    assert config_diff(shipped, config_dict(defaults)) == []


def test_default_stages(options):
    stages = load_config(options.SECTIONS, [CONFIG / "curriculum_config.json"])["curriculum"].stages
    assert [(s.name, s.gate) for s in stages] == [("easy", "random"), ("medium", "random"), ("hard", "mcts:200x1")]
    seven = {"goofspiel", "liars_dice", "leduc_poker", "gin_rummy", "othello", "hex", "clobber"}  # scored publicly
    assert seven <= {NAMES[game] for game in pool(stages[-1].games)}
    everything = load_config(options.SECTIONS, [CONFIG / "presets" / "all_games.json"])["curriculum"].stages
    assert all(sorted(pool(stage.games)) == list(range(22)) for stage in everything)


def read(options, *sets):
    return options.read_config(options.parse_args([f"--set={item}" for item in sets], None)).curriculum.stages


THREE = """curriculum.stages=[
    {"name": "a", "games": ["hex#0", "tic_tac_toe"]},
    {"name": "b", "games": {"hex#1-2": 6, "leduc_poker": 2}, "threshold": 0.7},
    {"name": "c", "games": ["clobber"], "opponent": "mcts:10x1"}]"""


@pytest.mark.parametrize(("named", "played"), {
    "[2,3,4,5]": "leduc_poker gin_rummy othello backgammon", "[3,4,5]": "gin_rummy othello backgammon",
    "[0,1,2,6,7]": "goofspiel liars_dice leduc_poker hex clobber", "TicTacToe,chess": "tic_tac_toe chess",
    '[2,2,"leduc",6]': "leduc_poker hex", "hex": "hex", "6": "hex", "2048": "2048",
}.items())  # fmt: skip
def test_games_that_are_named_are_what_every_stage_plays(options, named, played):
    """Each stage its own tasks of a game, else those of the first stage that plays it, else all; nothing is dropped."""
    before, stages = read(options, THREE), read(options, THREE, f"env.allowed_game_indices={named}")
    homes = [pool(stage.games) for stage in before]
    for stage, was, own in zip(stages, before, homes, strict=True):
        found = pool(stage.games)
        assert [NAMES[game] for game in found] == played.split()
        for game, ranges in found.items():
            assert ranges == next((h[game] for h in [own, *homes] if game in h), pool([NAMES[game]])[game])
        assert (stage.name, stage.opponent, stage.threshold) == (was.name, was.opponent, was.threshold)
    assert stages[1].weights == {game: {6: 6.0, 2: 2.0}.get(game, 4.0) for game in pool(stages[1].games)}


def test_ranges_of_a_game_that_is_named_keep_their_weights(options):
    one = 'curriculum.stages=[{"name": "a", "games": {"hex#0": 9, "hex#0-0": 2, "hex#1": 1, "leduc_poker": 10}}]'
    [stage] = read(options, one, "env.allowed_game_indices=hex,leduc_poker,clobber")
    found = {(NAMES[i], *r): w for i, ranges in pool(stage.games).items()
             for r, w in zip(ranges, stage.range_weights[i], strict=True)}  # fmt: skip
    size = CONFIGS_PER_GAME
    hexes, leduc, clobber = (NAMES.index(name) * size for name in ("hex", "leduc_poker", "clobber"))
    assert found == {
        ("hex", hexes, hexes): 11, ("hex", hexes + 1, hexes + 1): 1, ("leduc_poker", leduc, leduc + size - 1): 10,
        ("clobber", clobber, clobber + size - 1): 11,
    }  # fmt: skip
    assert config_dict({"stage": stage})["stage"]["games"] == stage.games  # as it is written into config.json


def test_an_opponent_that_is_named_is_that_of_every_stage(options):
    stages = read(options, "env.opponent=mcts:10x1")
    assert {(stage.opponent, stage.gate) for stage in stages} == {("mcts:10x1", "mcts:10x1")}
    assert [s.threshold for s in stages] == [s.threshold for s in read(options)]


@pytest.mark.parametrize("name", ["run.keep_last", "ppo.num_train_steps", "env.games_at_once"])
def test_numbers_beyond_all_counting_are_told(options, name):
    with pytest.raises(ConfigError, match=rf"{name} = 9+\.\.\.: expected a number of at most 9007199254740992"):
        read(options, f"{name}={'9' * 400}")


@pytest.mark.parametrize(
    ("section", "knobs"),
    [
        ("stage", {"name": "x", "games": ["hex"], "threshold": 2}),
        ("stage", {"name": "x", "games": "hex"}),
        ("stage", {"name": "x", "games": ["hex"], "opponent": ["random"]}),
        ("curriculum", {"stages": [Stage("x", [(0, 5)])], "sampling": "learnable"}),
        ("curriculum", {"stages": [Stage("x", ["hex"])], "failure_replay_prob": 1.5}),
        ("ppo", {"batch_size": 8.0}),
        ("model", {"dtype": "fp8"}),
        ("lora", {"target_modules": ["all-linear"]}),
        ("run", {"seed": -1}),
    ],
)
def test_a_configuration_made_in_python_keeps_to_its_limits(options, section, knobs):
    [*_, wrong] = knobs
    with pytest.raises(ConfigError, match=rf"^{section}\.{wrong}.* = .*: expected "):
        ({"stage": Stage} | options.SECTIONS)[section](**knobs)


def test_programs_are_no_games(options):
    with pytest.raises(ConfigError, match=r"^env.opponent: programs \(env.env_type trace\) have none"):
        read(options, "env.env_type=trace", "env.answer_mode=free", "env.opponent=self")
    with pytest.raises(ConfigError, match=r"trace.sourc = .*the nearest is trace.source"):
        read(options, "env.trace.sourc=x")
    with pytest.raises(ConfigError, match=r"^env.allowed_game_indices: programs have levels, not games; curriculum"):
        read(options, "env.env_type=trace", "env.answer_mode=free", "env.allowed_game_indices=[0]")


@pytest.mark.parametrize("preset", sorted(path.name for path in (CONFIG / "presets").glob("*.json")))
def test_preset_loads_and_changes_something(options, preset):
    files = [CONFIG.parent / name for name in options.DEFAULT_FILES]
    base = config_dict(load_config(options.SECTIONS, files))
    changed = config_dict(load_config(options.SECTIONS, [*files, CONFIG / "presets" / preset]))
    given_keys = {f"{s}.{key}" for s, part in read_json(CONFIG / "presets" / preset).items() for key in part}
    assert config_diff(base, changed)
    assert {line.split(":")[0] for line in config_diff(base, changed)} <= given_keys


def test_the_page_of_knobs_is_that_of_the_code_and_says_something_about_each(options):
    page = manual(TABLES)
    assert (CONFIG.parent / "docs" / "configuration.md").read_text() == page
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) == sum(len(dataclasses.fields(section)) for section in TABLES.values())
    assert [row[0] for row in rows if not row[3].strip()] == []
    moved = {row[0]: row[4] for row in rows}
    assert moved["| `gamma`"] == "documents", "the others say what is the default anyway"
