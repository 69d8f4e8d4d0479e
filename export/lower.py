"""Canonical graph -> TensorRT form: every function node of domain ``nextn`` becomes a plugin node of `plugins.ops`.

A plugin node stands for a known subgraph: its metadata property ``stands_for`` lists the canonical nodes. What is left
are standard operators that move or combine single values (Gather, Concat, Add, ...). State is input and aliased output
of one plugin each; positions become one device integer, the position of the first token.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.importers.onnx_importer import OnnxImporter
from onnx_graphsurgeon.logger import G_LOGGER

from export.config import ModelConfig
from export.graph import FUNCTION_DOMAIN, IR_VERSION, OPSET, Graph
from export.lower_matmul import Linear, MatmulGroup, find_groups
from export.raw_weights import RawMatrix, RawWeightStore
from export.weight_inputs import weights_as_inputs
from plugins import ops

STANDS_FOR = "stands_for"


def save_lowered(model: onnx.ModelProto, path: Path) -> None:
    """Check a model in TensorRT form and write it to ``path``.

    The weights are left out of the check: they lie inside the .gguf's tensors, whose bounds its reader has checked, and
    the ONNX checker refuses a hard-linked file."""
    onnx.checker.check_model(weights_as_inputs(model), full_check=True)
    temporary = path.with_name(path.name + ".part")
    onnx.save_model(model, temporary)
    os.replace(temporary, path)


def lower(graph: Graph, config: ModelConfig, store: RawWeightStore) -> onnx.ModelProto:
    """The TensorRT form of a canonical trunk or draft graph that was made with ``store``.

    Inputs: tokens i32 [T], position i32 [1], rows i32 [R], per layer ``blk.N.pool`` f32 [P] with one ``slot`` i32 [1],
    or ``blk.N.cache`` f16 [2, L, KV, D]; draft: hidden f32 [T, hidden]. Outputs: logits [R, V], hidden.out, and the
    state under its name + ``.out``. Weights are int8 initialisers in external data.
    """
    G_LOGGER.severity = G_LOGGER.ERROR  # its warnings are about what it leaves as it is, bfloat16 for one
    model = graph.model()
    del model.functions[:]
    lowering = _Lowering(gs.import_onnx(model), config, store)
    lowering.run()
    return lowering.export()


class _Lowering:
    def __init__(self, graph: gs.Graph, config: ModelConfig, store: RawWeightStore) -> None:
        self.graph, self.config, self.store = graph, config, store
        self.stands_for: dict[str, str] = {}
        self._weights: dict[str, gs.Constant] = {}
        self._wide: dict[tuple[str, ...], tuple[gs.Variable, tuple[Linear, ...]]] = {}
        self._state: list[gs.Variable] = []
        self._after: dict[str, gs.Variable] = {}

    def run(self) -> None:
        for tensor in self.graph.tensors().values():
            if tensor.name in self.store.vectors:
                tensor.values, tensor.data_location = self.store.vectors[tensor.name], None
        by_name = {tensor.name: tensor for tensor in self.graph.inputs}
        self.tokens = by_name["tokens"]
        self.tokens.dtype = by_name["rows"].dtype = np.dtype(np.int32)
        self.position = gs.Variable("position", np.int32, (1,))
        self.slot = gs.Variable("slot", np.int32, (1,))
        self.rope = gs.Variable("rope.tables", np.float32, (2, "T", self.config.rope.dim // 2))
        for group in find_groups(self.graph, self.store.raw):
            self._matmul(group)
        for node in [node for node in self.graph.nodes if node.op == "Concat"]:
            self._rms_norm_pair(node)
        handlers = {
            "GatedDeltaNet": self._gated_delta_net,
            "GatedAttention": self._gated_attention,
            "RopeTables": self._rope_tables,
            "SwiGLU": self._swiglu,
        }
        for node in sorted(self.graph.nodes, key=lambda node: node.op == "RopeTables"):  # after the embedding
            if not node.outputs:  # its results are made by a plugin node already
                continue
            if node.domain == FUNCTION_DOMAIN and node.op in handlers:
                handlers[node.op](node)
            elif node.op == "RMSNormalization":
                self._rms_norm(node)
            elif self._is_embedding(node):
                self._embedding(node)
        self._split_leftovers()
        self._drop_identities()
        kept = [tensor for tensor in self.graph.inputs if tensor.name in ("tokens", "rows", "hidden")]
        slot = [self.slot] if self.slot.outputs else []
        self.graph.inputs = [*kept[:1], self.position, *slot, *kept[1:], *self._state]
        self.graph.outputs = [tensor for tensor in self.graph.outputs if tensor.name in ("logits", "hidden.out")]
        self.graph.outputs += [self._after[tensor.name] for tensor in self._state]
        self.graph.cleanup().toposort()
        left = [node.name for node in self.graph.nodes if node.domain not in (None, "", ops.DOMAIN)]
        assert not left, f"not lowered: {left}"

    def export(self) -> onnx.ModelProto:
        """The model, each plugin node saying what it stands for."""
        self.graph.import_domains = [onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid(ops.DOMAIN, 1)]
        self.graph.functions = []
        model = gs.export_onnx(self.graph)
        model.ir_version = IR_VERSION
        for node in model.graph.node:
            if node.name in self.stands_for:
                node.metadata_props.add(key=STANDS_FOR, value=self.stands_for[node.name])
        return model

    def _plugin(
        self,
        op: ops.Op,
        name: str,
        inputs: Sequence[gs.Tensor],
        outputs: Sequence[gs.Variable],
        stands_for: Sequence[str],
        **attributes: int | float | list[int],
    ) -> None:
        """Add a plugin node; its outputs lose the producers they had."""
        assert set(attributes) == {each.name for each in op.attributes}, op.name
        for tensor in outputs:
            tensor.inputs.clear()
        node = gs.Node(op.name, name, attributes, list(inputs), list(outputs), domain=ops.DOMAIN)
        self.graph.nodes.append(node)
        self.stands_for[name] = " ".join(stands_for)

    def _matmul(self, group: MatmulGroup) -> None:
        norm, residual, swiglu = group.norm, group.residual, group.swiglu
        inputs = [norm.inputs[0] if norm else group.x, *(self._weight(linear.raw) for linear in group.linears)]
        nodes = [linear.node.name for linear in group.linears]
        if norm:
            inputs.append(norm.inputs[1])
            nodes.insert(0, norm.name)
        if residual:
            inputs.append(group.residual_input)
            nodes.append(residual.name)
        tokens = "R" if group.x.inputs and group.x.inputs[0].op == "Gather" else "T"
        if swiglu:
            nodes.append(swiglu.name)
        if len(group.linears) == 1 or swiglu:
            y = (residual or swiglu or group.linears[0].node).outputs[0]
        else:
            y = gs.Variable("+".join(nodes[1:] if norm else nodes))
            self._wide[tuple(linear.y.name for linear in group.linears)] = y, group.linears
        y.dtype = np.dtype(np.float32)
        y.shape = (tokens, sum(linear.raw.rows for linear in group.linears[: 1 if swiglu else None]))
        self._plugin(
            ops.KQUANT_MATMUL,
            y.name if "+" in y.name else nodes[-1],
            inputs,
            [y],
            nodes,
            types=[linear.raw.ggml_type for linear in group.linears],
            has_norm=int(norm is not None),
            has_residual=int(residual is not None),
            swiglu=int(swiglu is not None),
            epsilon=self.config.rms_eps,
        )

    def _is_embedding(self, node: gs.Node) -> bool:
        gathers_rows = node.op == "Gather" and node.inputs[0].name in self.store.raw
        return gathers_rows or (node.domain == FUNCTION_DOMAIN and node.op.startswith("BlockEmbedding"))

    def _embedding(self, node: gs.Node) -> None:
        table = node.inputs[1 if node.domain == FUNCTION_DOMAIN else 0]
        raw, y, nodes = self.store.raw[table.name], node.outputs[0], [node.name]
        if node.op == "Gather" and y.outputs[0].op == "Cast":
            nodes.append(y.outputs[0].name)
            y = y.outputs[0].outputs[0]
        y.dtype, y.shape, self.embedded = np.dtype(np.float32), ("T", raw.columns), y
        inputs = [self.tokens, self._weight(raw)]
        self._plugin(ops.KQUANT_EMBEDDING, node.name, inputs, [y], nodes, type=raw.ggml_type)

    def _rms_norm(self, node: gs.Node) -> None:
        (x, weight), y = node.inputs, node.outputs[0]
        width, epsilon = len(weight.values), self.config.rms_eps
        y.dtype, y.shape = np.dtype(np.float32), ("T", width)
        picks = [reader for reader in y.outputs if reader.op == "Gather" and reader.inputs[0] is y]
        if len(picks) != 1:
            self._plugin(ops.RMS_NORM, node.name, [x, weight], [y], [node.name], epsilon=epsilon)
            return
        # The rows that the LM head takes: no launch of their own, and none that the head's cannot overlap with.
        (pick,), picked = picks, picks[0].outputs[0]
        inputs, nodes = [x, weight, pick.inputs[1]], [node.name, pick.name]
        pick.inputs.clear()
        picked.dtype, picked.shape = np.dtype(np.float32), ("R", width)
        self._plugin(ops.RMS_NORM_ROWS, node.name, inputs, [y, picked], nodes, epsilon=epsilon)

    def _rms_norm_pair(self, concat: gs.Node) -> None:
        """Two norms side by side, as the draft head's first product takes them. The native Concat of TensorRT-RTX 1.6
        mixes the rows of plugin results up."""
        norms = [tensor.inputs[0] for tensor in concat.inputs if tensor.inputs and len(tensor.outputs) == 1]
        if len(norms) != 2 or any(norm.op != "RMSNormalization" for norm in norms):
            return
        y, inputs = concat.outputs[0], [tensor for norm in norms for tensor in norm.inputs]
        y.dtype, y.shape = np.dtype(np.float32), ("T", sum(len(norm.inputs[1].values) for norm in norms))
        nodes = [norm.name for norm in norms] + [concat.name]
        for node in (*norms, concat):
            node.outputs.clear()
        self._plugin(ops.RMS_NORM_PAIR, concat.name, inputs, [y], nodes, epsilon=self.config.rms_eps)

    def _rope_tables(self, node: gs.Node) -> None:
        inv_freq, factor = (tensor.values for tensor in node.inputs[1:])
        bits = gs.Constant("rope.inv_freq_bits", np.ascontiguousarray(inv_freq, np.float64).view(np.int64))
        node.outputs.clear()
        inputs = [self.embedded, self.position, bits]  # not the tokens: TensorRT copies inputs that two plugins read
        self._plugin(ops.ROPE_TABLES, node.name, inputs, [self.rope], [node.name], factor=float(factor.item()))

    def _gated_delta_net(self, node: gs.Node) -> None:
        gdn, prefix = self.config.gdn, node.name.split("/")[0]
        parameters = np.concatenate([self.store.vectors[tensor.name].ravel() for tensor in node.inputs[6:10]])
        state = self._state_pair(f"{prefix}.pool", np.float32, ("P",))
        rows, y = self._rows(node, 4), node.outputs[0]
        y.dtype, y.shape = np.dtype(np.float32), ("T", gdn.value_dim)
        self._plugin(
            ops.GATED_DELTA_NET,
            node.name,
            [rows, state[0], self.slot, gs.Constant(f"{prefix}.gdn_parameters", parameters)],
            [y, state[1]],
            [node.name],
            k_heads=gdn.num_k_heads,
            v_heads=gdn.num_v_heads,
            head_dim=gdn.head_dim,
            conv_kernel=gdn.conv_kernel,
            epsilon=self.config.rms_eps,
        )

    def _gated_attention(self, node: gs.Node) -> None:
        attention, prefix = self.config.attention, node.name.split("/")[0]
        norms = np.stack([self.store.vectors[tensor.name] for tensor in node.inputs[9:11]])
        shape = (2, "L", attention.num_kv_heads, attention.head_dim)
        cache = self._state_pair(f"{prefix}.cache", np.float16, shape)
        rows, y = self._rows(node, 3), node.outputs[0]
        y.dtype, y.shape = np.dtype(np.float32), ("T", attention.num_heads * attention.head_dim)
        self._plugin(
            ops.GATED_ATTENTION,
            node.name,
            [rows, self.position, self.rope, gs.Constant(f"{prefix}.attn_norms", norms), cache[0]],
            [y, cache[1]],
            [node.name],
            heads=attention.num_heads,
            kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            rope_dim=self.config.rope.dim,
            cache_type=ops.CACHE_DTYPES.index("float16"),
            epsilon=self.config.rms_eps,
        )

    def _swiglu(self, node: gs.Node) -> None:
        """A SwiGLU that no matmul took over: its body, which is elementwise."""
        (gate, up), y = node.inputs, node.outputs[0]
        y.inputs.clear()
        sigmoid, silu = gs.Variable(f"{node.name}/sigmoid"), gs.Variable(f"{node.name}/silu")
        steps = ("Sigmoid", [gate], sigmoid), ("Mul", [gate, sigmoid], silu), ("Mul", [silu, up], y)
        for op, inputs, output in steps:
            self.graph.nodes.append(gs.Node(op, output.name, inputs=inputs, outputs=[output]))

    def _rows(self, node: gs.Node, count: int) -> gs.Tensor:
        """The first ``count`` inputs of a node side by side: products of one input, so one plugin node makes them."""
        wide, _ = self._wide[tuple(tensor.name for tensor in node.inputs[:count])]
        node.inputs.clear()
        return wide

    def _state_pair(self, name: str, dtype: type, shape: tuple[int | str, ...]) -> tuple[gs.Variable, gs.Variable]:
        before, after = gs.Variable(name, dtype, shape), gs.Variable(f"{name}.out", dtype, shape)
        self._state.append(before)
        self._after[name] = after
        return before, after

    def _split_leftovers(self) -> None:
        """Matrices of one plugin node whose results are used one by one."""
        for wide, linears in self._wide.values():
            parts = [linear.y for linear in linears]
            if not any(part.outputs for part in parts):
                continue
            for part in parts:
                part.inputs.clear()
            sizes = gs.Constant(f"{wide.name}/sizes", np.array([linear.raw.rows for linear in linears], np.int64))
            self.graph.nodes.append(gs.Node("Split", f"{wide.name}/split", {"axis": 1}, [wide, sizes], parts))

    def _drop_identities(self) -> None:
        """Outputs that were copies of another value: the value itself takes the name."""
        for index, output in enumerate(self.graph.outputs):
            node = output.inputs[0] if output.inputs else None
            if node is not None and node.op == "Identity":
                source = node.inputs[0]
                node.outputs.clear()
                source.name, source.dtype, source.shape = output.name, output.dtype, output.shape
                self.graph.outputs[index] = source

    def _weight(self, raw: RawMatrix) -> gs.Constant:
        if raw.weight.name not in self._weights:
            self._weights[raw.weight.name] = OnnxImporter.import_tensor(raw.weight.external_tensor())
        return self._weights[raw.weight.name]
