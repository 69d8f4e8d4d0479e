"""The three canonical graphs: trunk, draft (the NextN head) and replay (recurrent state of a part of a pass)."""

from __future__ import annotations

from export import functions
from export.config import ModelConfig
from export.gguf_file import GGUFFile
from export.graph import Graph
from export.layers import FLOAT, INT64, Layers
from export.weights import WeightStore


def trunk_graph(file: GGUFFile, config: ModelConfig, store: WeightStore) -> Graph:
    """tokens, positions [T], rows [R] and state -> logits [R, V], hidden.out [T, D] (after output_norm) and state.

    Positions are consecutive. State per layer: `functions.gated_delta_net`, `functions.gated_attention`."""
    graph = Graph("trunk")
    tokens, positions = (graph.input(name, INT64, ["T"]) for name in ("tokens", "positions"))
    rows = graph.input("rows", INT64, ["R"])
    layers = Layers(graph, file, config, store)
    caches = {layer: layers.cache_inputs(layer) for layer in config.attention_layers}
    shared = layers.rope_and_mask(positions, next(iter(caches.values()))[0]) if caches else ("", "", "")
    x = layers.embedding(tokens)
    for layer in range(config.num_layers):
        with graph.scope(f"blk.{layer}"):
            normed = layers.rms_norm(x, "attn_norm", layer)
            if layer in caches:
                mixed = layers.attention(normed, layer, positions, shared, caches[layer])
            else:
                mixed = layers.gated_delta_net(normed, layer)
            x = layers.add(x, mixed, "mixer_residual")
            ffn = layers.ffn(layers.rms_norm(x, "post_attention_norm", layer), layer)
            x = layers.add(x, ffn, "ffn_residual")
    hidden = layers.rms_norm(x, "output_norm")
    layers.hidden_output(hidden)
    layers.logits(hidden, rows, "output")
    return graph


def draft_graph(file: GGUFFile, config: ModelConfig, store: WeightStore) -> Graph:
    """One NextN step. tokens, positions [T], hidden [T, D] (of the position before each token), rows [R] and the head's
    own KV cache -> logits [R, N] (guesses of the token after, N rows of its LM head), hidden.out [T, D] (after
    shared_head_norm), cache."""
    assert config.draft is not None
    layer = config.draft.layer
    graph = Graph("draft")
    tokens, positions = (graph.input(name, INT64, ["T"]) for name in ("tokens", "positions"))
    hidden = graph.input("hidden", FLOAT, ["T", config.hidden_size])
    rows = graph.input("rows", INT64, ["R"])
    layers = Layers(graph, file, config, store)
    caches = layers.cache_inputs(layer)
    shared = layers.rope_and_mask(positions, caches[0])
    with graph.scope(f"blk.{layer}"):
        embedded = layers.rms_norm(layers.embedding(tokens, "embed_tokens", layer), "enorm", layer)
        normed = layers.rms_norm(hidden, "hnorm", layer)
        x = layers.linear(graph.op("Concat", [embedded, normed], "concat", axis=1), "eh_proj", layer)
        mixed = layers.attention(layers.rms_norm(x, "attn_norm", layer), layer, positions, shared, caches)
        x = layers.add(x, mixed, "mixer_residual")
        x = layers.add(x, layers.ffn(layers.rms_norm(x, "post_attention_norm", layer), layer), "ffn_residual")
        out = layers.rms_norm(x, "shared_head_norm", layer)
    layers.hidden_output(out)
    layers.logits(out, rows, "shared_head_head", layer)
    return graph


def replay_graph(config: ModelConfig) -> Graph:
    """Per GDN layer: the state before a pass and the key, value, decay and rate of the tokens kept -> state.out."""
    graph = Graph("replay")
    heads, dim = config.gdn.num_v_heads, config.gdn.head_dim
    function = functions.replay(config.gdn)
    for layer in config.gdn_layers:
        prefix = f"blk.{layer}."
        inputs = [graph.input(prefix + "state", FLOAT, [1, heads, dim, dim])]
        for leaf, width in (("key", heads * dim), ("value", heads * dim), ("decay", heads), ("rate", heads)):
            inputs.append(graph.input(prefix + leaf, FLOAT, [1, "T", width]))
        graph.call(function, inputs, prefix + "replay", [prefix + "state.out"])
        graph.output(prefix + "state.out", FLOAT, [1, heads, dim, dim])
    return graph
