// The attributes of one op, from either of the two ways in: ONNX attributes of a node of ours, or the text that a
// LinearAttention node carries for TensorRT-RTX 1.6.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "trt_api.h"

namespace nextn {

enum class AttributeKind { kINT, kINTS, kFLOAT };

struct AttributeSpec {
    char const* name;
    AttributeKind kind;
};

class Attributes {
public:
    // False, with `error` set, when an attribute of `specs` is missing or of another type.
    static bool fromFields(std::vector<AttributeSpec> const& specs, nvinfer1::PluginFieldCollection const& fields,
                           Attributes* out, std::string* error);
    // rule: "name=value;name=value", lists with commas.
    static bool fromRule(std::vector<AttributeSpec> const& specs, std::string const& rule, Attributes* out,
                         std::string* error);

    int32_t integer(char const* name) const { return mInts.at(name).at(0); }
    std::vector<int32_t> const& integers(char const* name) const { return mInts.at(name); }
    float number(char const* name) const { return mFloats.at(name); }

    // Fields that point into this object.
    std::vector<nvinfer1::PluginField> fields() const;

private:
    bool complete(std::vector<AttributeSpec> const& specs, std::string* error) const;

    std::map<std::string, std::vector<int32_t>> mInts;
    std::map<std::string, float> mFloats;
};

}  // namespace nextn
