"""An inspection as text for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from engines.sizes import size_text


def table(report: dict[str, Any]) -> str:
    return "\n".join(_lines(report))


def _lines(report: dict[str, Any]) -> Iterator[str]:
    yield f"{report['name']} ({report['file']}), {size_text(report['bytes'])} of tensors"
    yield ""
    yield from _geometry(report["geometry"])
    yield ""
    yield from _tensors(report["tensors"])
    yield ""
    yield from _tensorrt(report["tensorrt"])
    yield ""
    yield from _memory(report)
    yield ""
    yield from _roofline(report["roofline"])
    yield ""
    yield "odd about this file" if report["odd"] else "nothing odd about this file"
    yield from (f"  - {line}" for line in report["odd"])
    if build := report["build"]:
        yield from ("", f"build {build['folder']} on {build['backend']}")
        yield from (f"  - {fault}" for fault in build["faults"])
        if not build["faults"]:
            yield f"  {build['said']}"


def _geometry(geometry: dict[str, Any]) -> Iterator[str]:
    attention, gdn, rope = geometry["attention"], geometry["gdn"], geometry["rope"]
    draft = geometry["draft"]
    yield "geometry"
    yield from _aligned(
        [
            ("layers", f"{geometry['num_layers']}, every {geometry['full_attention_interval']}th with full attention"),
            ("NextN head", "none" if draft is None else f"block {draft['layer']}"),
            ("hidden, ffn", f"{geometry['hidden_size']}, {geometry['ffn_size']}"),
            ("vocabulary", f"{geometry['vocab_size']}" + (", LM head tied" if geometry["tied_lm_head"] else "")),
            (
                "attention",
                f"{attention['num_heads']} heads of {attention['head_dim']}, {attention['num_kv_heads']} for keys and "
                "values",
            ),
            (
                "delta net",
                f"{gdn['num_k_heads']} key and {gdn['num_v_heads']} value heads of {gdn['head_dim']}, "
                f"convolution over {gdn['conv_kernel']}",
            ),
            ("rope", f"base {rope['theta']:g}, {rope['dim']} of a head's values"),
            ("context", f"{geometry['context_length']} tokens"),
        ]
    )


def _tensors(groups: Sequence[dict[str, Any]]) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [("tensors", "type", "count", "size", "ONNX Runtime", "", "TensorRT")]
    rows += [
        (
            group["role"],
            group["type"],
            str(group["tensors"]),
            size_text(group["bytes"]),
            size_text(group["onnx_bytes"]),
            group["onnx"],
            group["tensorrt"],
        )
        for group in groups
    ]
    sizes = [size_text(sum(group[key] for group in groups)) for key in ("bytes", "onnx_bytes")]
    rows.append(("total", "", str(sum(group["tensors"] for group in groups)), *sizes, "", ""))
    yield from _aligned(rows, right=(2, 3, 4), indent="")


def _tensorrt(graphs: dict[str, Any]) -> Iterator[str]:
    if graphs["refusal"]:
        yield f"TensorRT: not possible, {graphs['refusal']}"
        return
    yield "TensorRT graphs"
    for role in ("trunk", "draft"):
        if role not in graphs:
            continue
        graph = graphs[role]
        yield f"  {role}: {graph['layer_nodes']} layers of one node each; plugins {_counts(graph['plugin_nodes'])}"
        yield f"    native operators {_counts(graph['standard_nodes'])}"
        yield from (f"    {count} layer nodes: {how}" for how, count in graph["layer_kernels"].items())
        yield from (f"    {note}" for note in graph["notes"])


def _memory(report: dict[str, Any]) -> Iterator[str]:
    memory = report["memory"]
    on_cpu = memory["onnxruntime"]
    yield f"memory for a context of {report['context']} tokens"
    parts = ("weights", "kv_caches", "states", "activations", "buffers", "recorded", "code", "driver", "total")
    rows: list[tuple[str, ...]] = [("", *(_part_title(part) for part in parts))]
    for kind, plan in memory["tensorrt"].items():
        rows.append((f"GPU, {kind} KV caches", *(size_text(plan[part]) for part in parts)))
    rows.append(("ONNX Runtime", *(size_text(on_cpu[part]) if part in on_cpu else "-" for part in parts)))
    yield from _aligned(rows, right=range(1, len(parts) + 1))
    if memory["tensorrt"]:
        yield "  activations and engine code are estimates, which TensorRT settles when it builds; ONNX Runtime keeps"
        yield "  packed copies of some weights besides"


def _roofline(roofline: dict[str, Any]) -> Iterator[str]:
    if not roofline["cards"]:
        yield f"roofline: {roofline['note']}"
        return
    draft_n = roofline["draft_n"]
    yield f"roofline, f16 KV caches: most tokens a second that the memory's speed allows ({roofline['note']})"
    places = roofline["cards"][0]["bounds"]
    rows: list[tuple[str, ...]] = [("", "GB/s", "fits")]
    for place in places:
        rows[0] += (f"at {place['position']}", f"{draft_n} drafts, all taken")
    for card in roofline["cards"]:
        fits = {None: "?", True: "yes", False: "no"}
        row: tuple[str, ...] = (card["name"], f"{card['gb_per_s']:.0f}", fits[card["fits"]])
        for place in card["bounds"]:
            drafting = place["drafting_tokens_per_second"]
            row += (f"{place['tokens_per_second']:.0f}", "-" if drafting is None else f"{drafting:.0f}")
        rows.append(row)
    yield from _aligned(rows, right=range(1, len(rows[0])))


def _part_title(part: str) -> str:
    return {"kv_caches": "KV caches", "code": "engine code"}.get(part, part)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"


def _aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = (), indent: str = "  ") -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield (indent + "  ".join(cells)).rstrip()
