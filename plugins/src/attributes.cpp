#include "attributes.h"

#include <charconv>
#include <cstring>

namespace nextn {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

AttributeSpec const* find(std::vector<AttributeSpec> const& specs, std::string const& name) {
    for (AttributeSpec const& spec : specs)
        if (name == spec.name) return &spec;
    return nullptr;
}

template <typename T>
bool parse(std::string const& text, T* out) {
    auto const [end, code] = std::from_chars(text.data(), text.data() + text.size(), *out);
    return code == std::errc() && end == text.data() + text.size();
}

std::vector<std::string> split(std::string const& text, char separator) {
    std::vector<std::string> parts;
    size_t start = 0;
    for (size_t at; (at = text.find(separator, start)) != std::string::npos; start = at + 1)
        parts.push_back(text.substr(start, at - start));
    parts.push_back(text.substr(start));
    return parts;
}

}  // namespace

bool Attributes::fromFields(std::vector<AttributeSpec> const& specs, nvinfer1::PluginFieldCollection const& fields,
                            Attributes* out, std::string* error) {
    for (int32_t i = 0; i < fields.nbFields; ++i) {
        PluginField const& field = fields.fields[i];
        AttributeSpec const* spec = find(specs, field.name);
        if (!spec || !field.data || field.length < 1) continue;
        bool const isFloat = spec->kind == AttributeKind::kFLOAT;
        if (field.type != (isFloat ? PluginFieldType::kFLOAT32 : PluginFieldType::kINT32)) {
            *error = std::string("attribute ") + spec->name + " has field type "
                + std::to_string(static_cast<int>(field.type));
            return false;
        }
        if (isFloat) {
            std::memcpy(&out->mFloats[spec->name], field.data, sizeof(float));
        } else {
            auto const* values = static_cast<int32_t const*>(field.data);
            out->mInts[spec->name].assign(values, values + field.length);
        }
    }
    return out->complete(specs, error);
}

bool Attributes::fromRule(std::vector<AttributeSpec> const& specs, std::string const& rule, Attributes* out,
                          std::string* error) {
    for (std::string const& part : split(rule, ';')) {
        size_t const equals = part.find('=');
        AttributeSpec const* spec = equals == std::string::npos ? nullptr : find(specs, part.substr(0, equals));
        bool valid = spec != nullptr;
        if (valid && spec->kind == AttributeKind::kFLOAT) {
            valid = parse(part.substr(equals + 1), &out->mFloats[spec->name]);
        } else if (valid) {
            for (std::string const& number : split(part.substr(equals + 1), ','))
                valid = valid && parse(number, &out->mInts[spec->name].emplace_back());
        }
        if (!valid) {
            *error = "cannot read '" + part + "'";
            return false;
        }
    }
    return out->complete(specs, error);
}

bool Attributes::complete(std::vector<AttributeSpec> const& specs, std::string* error) const {
    for (AttributeSpec const& spec : specs) {
        auto const ints = mInts.find(spec.name);
        bool const found = spec.kind == AttributeKind::kFLOAT
            ? mFloats.count(spec.name) > 0
            : ints != mInts.end() && (spec.kind == AttributeKind::kINTS || ints->second.size() == 1);
        if (!found) {
            *error = std::string("attribute ") + spec.name + " is missing or not a single value";
            return false;
        }
    }
    return true;
}

std::vector<PluginField> Attributes::fields() const {
    std::vector<PluginField> out;
    for (auto const& [name, values] : mInts)
        out.push_back({name.c_str(), values.data(), PluginFieldType::kINT32, static_cast<int32_t>(values.size())});
    for (auto const& [name, value] : mFloats) out.push_back({name.c_str(), &value, PluginFieldType::kFLOAT32, 1});
    return out;
}

}  // namespace nextn
