// The gated attention of a layer as its attributes describe it: sizes, and where its tensors begin in norms and cache.
#pragma once
#include "attention.h"
#include "op.h"

namespace nextn {

struct AttentionGeometry {
    int32_t heads, kvHeads, dim, ropeDim, cacheType;

    explicit AttentionGeometry(Attributes const& a)
        : heads(a.integer("heads")),
          kvHeads(a.integer("kv_heads")),
          dim(a.integer("head_dim")),
          ropeDim(a.integer("rope_dim")),
          cacheType(a.integer("cache_type")) {}

    static std::vector<AttributeSpec> attributes() {
        return {{"heads", AttributeKind::kINT},      {"kv_heads", AttributeKind::kINT},
                {"head_dim", AttributeKind::kINT},   {"rope_dim", AttributeKind::kINT},
                {"cache_type", AttributeKind::kINT}, {"epsilon", AttributeKind::kFLOAT}};
    }

    int64_t queryDim() const { return static_cast<int64_t>(heads) * dim; }
    int64_t kvDim() const { return static_cast<int64_t>(kvHeads) * dim; }
    int64_t cacheRowBytes() const { return static_cast<int64_t>(nextn_cache_row_bytes(cacheType, dim)); }
    DataType cacheDtype() const { return cacheType == kNEXTN_CACHE_INT8 ? DataType::kINT8 : DataType::kHALF; }

    std::string contradiction() const {
        if (dim != 32 && dim != 64 && dim != 128 && dim != 256)
            return "head_dim " + std::to_string(dim) + "; takes 32, 64, 128, 256";
        if (kvHeads < 1 || heads < 1 || heads % kvHeads || heads / kvHeads > 8)
            return "heads / kv_heads is not a whole number up to 8";
        if (ropeDim < 2 || ropeDim % 2 || ropeDim > dim) return "rope_dim is odd or above head_dim";
        if (!cacheRowBytes()) return "cache_type " + std::to_string(cacheType) + "; takes 0 (float16), 1 (int8)";
        return "";
    }

    std::string refuseState(int64_t tokens, nvinfer1::Dims const& position, nvinfer1::Dims const& rope,
                            nvinfer1::Dims const& cache) const {
        std::string error = shapeMismatch("position", position, {1});
        if (error.empty()) error = shapeMismatch("rope", rope, {2, tokens, ropeDim / 2});
        int64_t const row = cacheType == kNEXTN_CACHE_INT8 ? cacheRowBytes() : dim;  // values
        return error.empty() ? shapeMismatch("cache", cache, {2, -1, kvHeads, row}) : error;
    }

    void sizes(NextnAttention* p) const {
        p->heads = heads;
        p->kv_heads = kvHeads;
        p->head_dim = dim;
        p->rope_dim = ropeDim;
        p->cache_type = cacheType;
    }

    // norms: of query heads, of key heads. rope: cos, sin of `tokens` rows. cache: keys, values of `capacity` rows.
    void tensors(NextnAttention* p, float const* norms, void const* position, void const* rope, int64_t tokens,
                 void* cache, int64_t capacity) const {
        p->q_norm = norms;
        p->k_norm = norms + dim;
        p->position = static_cast<int32_t const*>(position);
        p->cos = static_cast<float const*>(rope);
        p->sin = p->cos + tokens * (ropeDim / 2);
        p->capacity = static_cast<int32_t>(capacity);
        p->key_cache = cache;
        p->value_cache = static_cast<uint8_t*>(cache) + capacity * kvHeads * cacheRowBytes();
    }
};

}  // namespace nextn
