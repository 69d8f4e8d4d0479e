// Creators of all ops, and the two symbols that TensorRT looks up in a plugin library.
#include <cstring>
#include <exception>

#include "op_plugin.h"

namespace nextn {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;

// With or without a closing zero: both occur.
std::string textOf(char const* name, PluginFieldCollection const* fields) {
    for (int32_t i = 0; fields && i < fields->nbFields; ++i) {
        PluginField const& field = fields->fields[i];
        if (std::strcmp(field.name, name) || field.type != PluginFieldType::kCHAR || !field.data) continue;
        auto const* text = static_cast<char const*>(field.data);
        return std::string(text, strnlen(text, field.length));
    }
    return "";
}

// As it was when the engine was built, else as the importer names it.
std::string layerOf(char const* name, PluginFieldCollection const* fields) {
    std::string const kept = textOf(kLAYER_FIELD, fields);
    return kept.empty() && name ? name : kept;
}

class OpCreator final : public nvinfer1::IPluginCreatorV3One {
public:
    explicit OpCreator(OpInfo const& info) : mInfo(info) {
        for (AttributeSpec const& spec : info.attributes) {
            bool const isFloat = spec.kind == AttributeKind::kFLOAT;
            mFields.push_back({spec.name, nullptr, isFloat ? PluginFieldType::kFLOAT32 : PluginFieldType::kINT32,
                               spec.kind == AttributeKind::kINTS ? 0 : 1});
        }
        mCollection = {static_cast<int32_t>(mFields.size()), mFields.data()};
    }

    nvinfer1::IPluginV3* createPlugin(char const* name, PluginFieldCollection const* fields,
                                      nvinfer1::TensorRTPhase) noexcept override {
        try {
            std::string const layer = layerOf(name, fields);
            Attributes attributes;
            std::string error;
            if (fields && Attributes::fromFields(mInfo.attributes, *fields, &attributes, &error))
                return OpPlugin::create(mInfo, std::move(attributes), layer, std::nullopt);
            report(mInfo.name, layer, error);
        } catch (std::exception const& e) {
            report(mInfo.name, "", e.what());
        }
        return nullptr;
    }

    PluginFieldCollection const* getFieldNames() noexcept override { return &mCollection; }
    char const* getPluginName() const noexcept override { return mInfo.name; }
    char const* getPluginVersion() const noexcept override { return kVERSION; }
    char const* getPluginNamespace() const noexcept override { return kNAMESPACE; }

private:
    OpInfo const& mInfo;
    std::vector<PluginField> mFields;
    PluginFieldCollection mCollection;
};

// Takes LinearAttention nodes whose update_rule is "OP;name=value;...".
class CarrierCreator final : public nvinfer1::IPluginCreatorV3One {
public:
    nvinfer1::IPluginV3* createPlugin(char const* name, PluginFieldCollection const* fields,
                                      nvinfer1::TensorRTPhase) noexcept override {
        try {
            std::string const layer = layerOf(name, fields);
            std::string const text = textOf(kCARRIER_FIELD, fields), op = text.substr(0, text.find(';'));
            std::string error = "no op of this library";
            for (OpInfo const* info : allOps()) {
                if (op != info->name) continue;
                std::string const rest = op.size() < text.size() ? text.substr(op.size() + 1) : "";
                Attributes attributes;
                if (Attributes::fromRule(info->attributes, rest, &attributes, &error))
                    return OpPlugin::create(*info, std::move(attributes), layer, text);
            }
            report(kCARRIER, layer, "update_rule '" + text + "': " + error);
        } catch (std::exception const& e) {
            report(kCARRIER, "", e.what());
        }
        return nullptr;
    }

    PluginFieldCollection const* getFieldNames() noexcept override { return &mCollection; }
    char const* getPluginName() const noexcept override { return kCARRIER; }
    char const* getPluginVersion() const noexcept override { return kVERSION; }
    char const* getPluginNamespace() const noexcept override { return kNAMESPACE; }

private:
    // All that the importer hands over.
    std::vector<PluginField> mFields{{kCARRIER_FIELD, nullptr, PluginFieldType::kCHAR, 0},
                                     {"scale", nullptr, PluginFieldType::kFLOAT32, 1},
                                     {"q_num_heads", nullptr, PluginFieldType::kINT32, 1},
                                     {"kv_num_heads", nullptr, PluginFieldType::kINT32, 1},
                                     {"chunk_size", nullptr, PluginFieldType::kINT32, 1}};
    PluginFieldCollection mCollection{static_cast<int32_t>(mFields.size()), mFields.data()};
};

}  // namespace
}  // namespace nextn

extern "C" __attribute__((visibility("default"))) void setLoggerFinder(nvinfer1::ILoggerFinder*) {}

extern "C" __attribute__((visibility("default"))) nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
    static std::vector<nvinfer1::IPluginCreatorInterface*> const creators = [] {
        std::vector<nvinfer1::IPluginCreatorInterface*> all;
        // They live as long as the process: the registry keeps pointers to them.
        for (nextn::OpInfo const* info : nextn::allOps()) all.push_back(new nextn::OpCreator(*info));
        all.push_back(new nextn::CarrierCreator);
        return all;
    }();
    count = static_cast<int32_t>(creators.size());
    return creators.data();
}
