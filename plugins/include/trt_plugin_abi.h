// Binary interface that TensorRT calls a V3 plugin through.
//
// TensorRT wheels carry shared objects but no headers, so the part of the interface that a plugin library
// needs is restated here.  Nothing is linked: every call goes through a vtable, so what has to match is slot
// order, argument types and struct layout (asserted at the bottom).  The same for TensorRT 10.3 to 11.1 and
// TensorRT-RTX 1.6 and 1.7.  With the SDK's headers at hand, configure with -DTENSORRT_INCLUDE_DIR=... instead.
#pragma once
#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace nvinfer1 {

enum class DataType : int32_t { kFLOAT, kHALF, kINT8, kINT32, kBOOL, kUINT8, kFP8, kBF16, kINT64, kINT4, kFP4, kE8M0 };
enum class TensorFormat : int32_t { kLINEAR = 0 };
enum class PluginFieldType : int32_t {
    kFLOAT16, kFLOAT32, kFLOAT64, kINT8, kINT16, kINT32, kCHAR, kDIMS, kUNKNOWN, kBF16, kINT64, kFP8, kINT4, kFP4
};
enum class TensorRTPhase : int32_t { kBUILD, kRUNTIME };
enum class PluginCapabilityType : int32_t { kCORE, kBUILD, kRUNTIME };
enum class APILanguage : int32_t { kCPP, kPYTHON };
enum class DimensionOperation : int32_t { kSUM, kPROD, kMAX, kMIN, kSUB, kEQUAL, kLESS, kFLOOR_DIV, kCEIL_DIV };

struct Dims64 {
    static constexpr int32_t MAX_DIMS = 8;
    int32_t nbDims;
    int64_t d[MAX_DIMS];
};
using Dims = Dims64;

struct PluginTensorDesc { Dims dims; DataType type; TensorFormat format; float scale; };
struct DynamicPluginTensorDesc { PluginTensorDesc desc; Dims min, max, opt; };

struct PluginField {
    char const* name = nullptr;
    void const* data = nullptr;
    PluginFieldType type = PluginFieldType::kUNKNOWN;
    int32_t length = 0;
};
struct PluginFieldCollection { int32_t nbFields = 0; PluginField const* fields = nullptr; };

// What an implementation says about itself; TensorRT reads it before trusting the other slots.
struct InterfaceInfo { char const* kind; int32_t major, minor; };

class IVersionedInterface {
public:
    virtual APILanguage getAPILanguage() const noexcept { return APILanguage::kCPP; }
    virtual InterfaceInfo getInterfaceInfo() const noexcept = 0;
    virtual ~IVersionedInterface() noexcept = default;
};

// --- shape expressions: thin handles owned by TensorRT, forwarding to a second object ---
class IDimensionExpr;
namespace impl {
struct VDim {
    virtual ~VDim() noexcept = default;
    virtual bool isConstant() const = 0;
    virtual int64_t getConstantValue() const = 0;
    virtual bool isSizeTensor() const = 0;
};
struct VExpr {
    virtual ~VExpr() noexcept = default;
    virtual IDimensionExpr const* constant(int64_t) = 0;
    virtual IDimensionExpr const* operation(DimensionOperation, IDimensionExpr const&, IDimensionExpr const&) = 0;
    virtual IDimensionExpr const* declareSizeTensor(int32_t, IDimensionExpr const&, IDimensionExpr const&) = 0;
};
} // namespace impl

class IDimensionExpr {
public:
    bool isConstant() const noexcept { return mImpl->isConstant(); }
    int64_t getConstantValue() const noexcept { return mImpl->getConstantValue(); }
protected:
    virtual ~IDimensionExpr() noexcept = default;
    impl::VDim* mImpl;
};
class IExprBuilder {
public:
    IDimensionExpr const* constant(int64_t v) noexcept { return mImpl->constant(v); }
    IDimensionExpr const* operation(DimensionOperation op, IDimensionExpr const& a, IDimensionExpr const& b) noexcept
    { return mImpl->operation(op, a, b); }
protected:
    virtual ~IExprBuilder() noexcept = default;
    impl::VExpr* mImpl;
};
struct DimsExprs { int32_t nbDims; IDimensionExpr const* d[Dims::MAX_DIMS]; };

class IPluginResourceContext;   // passed through, never opened
class ILoggerFinder;            // likewise

// --- what a plugin implements ---
class IPluginCapability : public IVersionedInterface {};

class IPluginV3 : public IVersionedInterface {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN", 1, 0}; }
    virtual IPluginCapability* getCapabilityInterface(PluginCapabilityType) noexcept = 0;
    virtual IPluginV3* clone() noexcept = 0;
};

class IPluginV3OneCore : public IPluginCapability {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_CORE", 1, 0}; }
    virtual char const* getPluginName() const noexcept = 0;
    virtual char const* getPluginVersion() const noexcept = 0;
    virtual char const* getPluginNamespace() const noexcept = 0;
};

class IPluginV3OneBuild : public IPluginCapability {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_BUILD", 1, 0}; }
    virtual int32_t configurePlugin(DynamicPluginTensorDesc const* in, int32_t nIn,
                                    DynamicPluginTensorDesc const* out, int32_t nOut) noexcept = 0;
    virtual int32_t getOutputDataTypes(DataType* out, int32_t nOut, DataType const* in, int32_t nIn) const noexcept = 0;
    virtual int32_t getOutputShapes(DimsExprs const* in, int32_t nIn, DimsExprs const* shapeIn, int32_t nShapeIn,
                                    DimsExprs* out, int32_t nOut, IExprBuilder&) noexcept = 0;
    virtual bool supportsFormatCombination(int32_t pos, DynamicPluginTensorDesc const* inOut,
                                           int32_t nIn, int32_t nOut) noexcept = 0;
    virtual int32_t getNbOutputs() const noexcept = 0;
    virtual size_t getWorkspaceSize(DynamicPluginTensorDesc const*, int32_t,
                                    DynamicPluginTensorDesc const*, int32_t) const noexcept { return 0; }
    virtual int32_t getValidTactics(int32_t*, int32_t) noexcept { return 0; }
    virtual int32_t getNbTactics() noexcept { return 0; }
    virtual char const* getTimingCacheID() noexcept { return nullptr; }
    virtual int32_t getFormatCombinationLimit() noexcept { return 100; }
    virtual char const* getMetadataString() noexcept { return nullptr; }
};

// Second revision of the build capability: an output may name the input whose memory it shares.
class IPluginV3OneBuildV2 : public IPluginV3OneBuild {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_BUILD", 2, 0}; }
    virtual int32_t getAliasedInput(int32_t /*output*/) noexcept { return -1; }
};

class IPluginV3OneRuntime : public IPluginCapability {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_RUNTIME", 1, 0}; }
    virtual int32_t setTactic(int32_t) noexcept { return 0; }
    virtual int32_t onShapeChange(PluginTensorDesc const* in, int32_t nIn,
                                  PluginTensorDesc const* out, int32_t nOut) noexcept = 0;
    virtual int32_t enqueue(PluginTensorDesc const* inDesc, PluginTensorDesc const* outDesc, void const* const* in,
                            void* const* out, void* workspace, CUstream_st* stream) noexcept = 0;
    virtual IPluginV3* attachToContext(IPluginResourceContext*) noexcept = 0;
    virtual PluginFieldCollection const* getFieldsToSerialize() noexcept = 0;
};

class IPluginCreatorInterface : public IVersionedInterface {};

class IPluginCreatorV3One : public IPluginCreatorInterface {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN CREATOR_V3ONE", 1, 0}; }
    virtual IPluginV3* createPlugin(char const* name, PluginFieldCollection const*, TensorRTPhase) noexcept = 0;
    virtual PluginFieldCollection const* getFieldNames() noexcept = 0;
    virtual char const* getPluginName() const noexcept = 0;
    virtual char const* getPluginVersion() const noexcept = 0;
    virtual char const* getPluginNamespace() const noexcept = 0;
};

static_assert(sizeof(Dims) == 72 && sizeof(PluginTensorDesc) == 88 && sizeof(DynamicPluginTensorDesc) == 304);
static_assert(offsetof(PluginTensorDesc, type) == 72 && offsetof(PluginTensorDesc, format) == 76
              && offsetof(PluginTensorDesc, scale) == 80 && sizeof(PluginTensorDesc::scale) == 4);
static_assert(offsetof(DynamicPluginTensorDesc, min) == 88 && offsetof(DynamicPluginTensorDesc, max) == 160
              && offsetof(DynamicPluginTensorDesc, opt) == 232);
static_assert(offsetof(PluginField, data) == 8 && offsetof(PluginField, type) == 16
              && offsetof(PluginField, length) == 20);
static_assert(sizeof(PluginField) == 24 && sizeof(PluginFieldCollection) == 16 && sizeof(DimsExprs) == 72);
} // namespace nvinfer1

// What IPluginRegistry::loadLibrary looks up in the shared object:
//   extern "C" void setLoggerFinder(nvinfer1::ILoggerFinder*);
//   extern "C" nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count);
