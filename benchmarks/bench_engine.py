"""What it costs a training process to let servers play: CPU per answer, and an adapter to disk after every update.

    OMP_NUM_THREADS=1 python benchmarks/bench_engine.py [--answers 2000] [--json out/engine.json]

The server is a process that answers every completion at once with the same token: what is measured is the client, the
bound on rollouts however fast the GPUs behind are. Adapters have the tensors of rank-16 LoRA on Qwen3-4B.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from benchmarks.common import Row, parser, table, write
from envs.config import EnvConfig
from envs.types import Query
from policy.chat import ChatFormat
from policy.vllm_player import Engine
from training.process import at_least, run_program
from utils import write_directory

ROOT = Path(__file__).resolve().parents[1]
AT_ONCE = 256
ADAPTER_4B = 33_030_144  # parameters, docs/results.md


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:  # the client has hung up
            return writer.close()
        length = next(
            (int(h.split(b":")[1]) for h in head.split(b"\r\n") if h.lower().startswith(b"content-length")), 0
        )
        body = json.loads(await reader.readexactly(length)) if length else {}
        choice = {"index": 0, "text": "", "token_ids": [body.get("stop_token_ids", [0])[0]]}
        choice["logprobs"] = {"token_logprobs": [-0.1]}
        answer = json.dumps({"model": body.get("model"), "choices": [choice]}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(answer))
        writer.write(answer)
        await writer.drain()


def _serve(port: Any) -> None:
    async def run() -> None:
        server = await asyncio.start_server(_answer, "127.0.0.1", 0)
        port.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


def client_row(engine: Engine, tokens: int, answers: int) -> Row:
    """CPU milliseconds of this process for each answer to a prompt of about ``tokens`` tokens."""
    word = "card "
    text = word * max(1, round(tokens / len(engine.policy.chat.encode(word))))

    def said(n: int) -> list[dict[str, str]]:  # no two alike: tokens of a text are kept
        return [{"role": "system", "content": "s"}, {"role": "user", "content": f"{n + AT_ONCE:06d} {text}"}]

    wall = cpu = length = 0.0
    for start in range(-AT_ONCE, answers, AT_ONCE):  # the first round opens the connections
        queries = [Query(start + n, 0, said(start + n), {1: "a", 2: "b"}, (start + n, 0, 0, 1)) for n in range(AT_ONCE)]
        began, spent = time.perf_counter(), time.process_time()
        actions = engine.act(queries)
        if start >= 0:
            wall, cpu = wall + time.perf_counter() - began, cpu + time.process_time() - spent
        assert not any(action.error for action in actions), actions[0].error
        length = actions[0].sequence.decisions[0].start if actions[0].sequence else 0
    rounds = -(-answers // AT_ONCE) * AT_ONCE
    return {"prompt tokens": int(length), "CPU ms an answer": 1e3 * cpu / rounds, "answers/s at most": rounds / cpu,
            "answers/s with this server": rounds / wall}  # fmt: skip


def adapter_seconds(folder: Path, repeats: int = 3) -> float:
    """Seconds to write an adapter of Qwen3-4B's size to disk for good; the best of some."""
    tensors = {f"layer.{i}": torch.randn(ADAPTER_4B // 36 // 2560, 2560) for i in range(36)}
    best = float("inf")
    for n in range(repeats):
        began = time.perf_counter()
        write_directory(folder / f"adapter{n}", lambda path: save_file(tensors, path / "adapter_model.safetensors"))
        best = min(best, time.perf_counter() - began)
    return best


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    add = (flags := parser(__doc__)).add_argument
    add("--answers", type=at_least(1), default=2000)
    args = flags.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "tiny")
    policy: Any = SimpleNamespace(
        chat=ChatFormat(tokenizer), tokenizer=tokenizer, constrained=False, greedy=False, temperature=1.0, seed=0,
        max_new_tokens=4, max_seq_length=10**6, act=lambda queries: [], save=lambda path: None,
        base=SimpleNamespace(config=SimpleNamespace(vocab_size=len(tokenizer))), action_probs=None,
    )  # fmt: skip
    port: Any = multiprocessing.Queue()
    server = multiprocessing.Process(target=_serve, args=(port,), daemon=True)
    server.start()
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(policy, EnvConfig(vllm_base_url=f"http://127.0.0.1:{port.get()}/v1"), Path(folder))
        engine.publish(0)
        rows = [client_row(engine, tokens, args.answers) for tokens in (60, 500, 1500, 4000)]
        seconds = adapter_seconds(Path(folder))
        engine.close()
    server.terminate()
    print(table(rows), end="\n\n")
    print(f"an adapter of {ADAPTER_4B * 4 / 1e6:.0f} MB written and flushed to disk: {seconds:.2f} s")
    write(args.json, {"answers": args.answers, "at once": AT_ONCE}, rows, {"adapter_seconds": seconds})
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
