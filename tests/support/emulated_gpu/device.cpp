// The device "gpu": torch's PrivateUse1 key over host memory. Each kernel is the CPU's, run on aliases of that memory,
// so values are the CPU's, while autograd, dispatch and the rules of devices are those of an accelerator.
//
// Everything on which the host of a real GPU waits for the device is reported to a callback: a value that is read, a
// shape that depends on values, a copy from or to memory that is not pinned. Mixing devices in one operation is an error.

// Not ATen/ATen.h, nor what includes it: they take most of a minute to compile.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <set>

namespace at::autocast {  // of ATen/autocast_mode.h
TORCH_API ScalarType get_autocast_dtype(DeviceType);
TORCH_API Tensor cached_cast(ScalarType, const Tensor&, DeviceType);
}  // namespace at::autocast

namespace {

constexpr auto GPU = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(GPU, 0);

// ---- what the host waits for

using Report = void (*)(const char*);
Report report = nullptr;

void host_waits(const std::string& what) {
  if (report != nullptr) report(what.c_str());
}

// ---- memory

std::mutex pinned_lock;
std::set<std::pair<const char*, const char*>> pinned;  // from, to

bool is_pinned(const void* pointer) {
  const auto* address = static_cast<const char*>(pointer);
  std::lock_guard<std::mutex> hold(pinned_lock);
  for (const auto& [from, to] : pinned)
    if (from <= address && address < to) return true;
  return false;
}

void* make(size_t bytes) { return bytes ? aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr; }

void unpin(void* pointer) {
  {
    std::lock_guard<std::mutex> hold(pinned_lock);
    for (auto found = pinned.begin(); found != pinned.end(); ++found)
      if (found->first == pointer) {
        pinned.erase(found);
        break;
      }
  }
  std::free(pointer);
}

std::atomic<int64_t> held{0}, most_held{0};  // bytes of the device's memory

struct Block {
  void* memory;
  int64_t bytes;
};

void release(void* block) {
  auto* gone = static_cast<Block*>(block);
  held -= gone->bytes;
  std::free(gone->memory);
  delete gone;
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* block = new Block{make(bytes), static_cast<int64_t>(bytes)};
    const int64_t now = held += block->bytes;
    for (int64_t most = most_held; most < now && !most_held.compare_exchange_weak(most, now);) {}
    return {block->memory, block, &release, DEVICE};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
} device_memory;

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = make(bytes);
    if (memory != nullptr) {
      std::lock_guard<std::mutex> hold(pinned_lock);
      pinned.emplace(static_cast<char*>(memory), static_cast<char*>(memory) + bytes);
    }
    return {memory, memory, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
} pinned_memory;

// ---- one device with one stream, on which everything is done when it was begun

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return GPU; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() <= 0, "this process has one emulated GPU, so there is no ", device);
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { host_waits("synchronize a stream"); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::Device getDeviceFromPtr(void*) const override { return DEVICE; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  // torch.Generator("gpu") is not here: the device draws from a generator of the CPU's kind, see `run_on_cpu`.
} hooks;

// ---- tensors

at::Tensor memory_of(const at::Tensor& tensor) {  // the same memory as a CPU tensor
  if (!tensor.defined() || tensor.device().type() != GPU) return tensor;
  return at::for_blob(tensor.unsafeGetTensorImpl()->mutable_data(), tensor.sizes())
      .strides(tensor.strides())
      .options(tensor.options().device(at::kCPU).requires_grad(false))
      .make_tensor();
}

at::ScalarType type_or_default(std::optional<at::ScalarType> type) {
  return type.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
}

const c10::DispatchKeySet KEY(c10::DispatchKey::PrivateUse1);

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> type,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &device_memory, KEY, type_or_default(type));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &device_memory, KEY, type_or_default(type), format);
}

at::Tensor as_strided(const at::Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  return at::cpu::as_strided(tensor, size, stride, offset);
}

at::Tensor on_device(const at::Tensor& tensor) {  // a copy
  auto copy = empty_strided(tensor.sizes(), tensor.strides(), tensor.scalar_type(), {}, {}, {});
  at::AutoDispatchBelowADInplaceOrView below;
  memory_of(copy).copy_(tensor);
  return copy;
}

void become(const at::Tensor& tensor, const at::Tensor& other) {
  auto* mine = tensor.unsafeGetTensorImpl();
  mine->set_storage_keep_dtype(other.storage());
  mine->set_storage_offset(other.storage_offset());
  mine->set_sizes_and_strides(other.sizes(), other.strides());
}

const at::Tensor& resize_(const at::Tensor& tensor, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  at::Tensor fresh = empty(size, tensor.scalar_type(), {}, {}, {}, {});
  if (tensor.numel() && fresh.numel())
    memcpy(fresh.mutable_data_ptr(), tensor.data_ptr(), std::min(tensor.nbytes(), fresh.nbytes()));
  become(tensor, fresh);
  return tensor;
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  auto* mine = tensor.unsafeGetTensorImpl();
  mine->set_storage_keep_dtype(storage);
  mine->set_storage_offset(offset);
  if (stride.empty() && !size.empty())
    mine->set_sizes_contiguous(size);
  else
    mine->set_sizes_and_strides(size, stride);
  return tensor;
}

at::Tensor& set_whole_storage(at::Tensor& tensor, at::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / tensor.itemsize());
  return set_storage(tensor, std::move(storage), 0, {count}, {});
}

// ---- between host and device

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const bool reads = to.is_cpu(), writes = from.is_cpu();
  const at::Tensor& on_host = reads ? to : from;
  if ((reads || writes) && from.numel() && !(non_blocking && is_pinned(on_host.data_ptr())))
    host_waits(reads ? "copy to the host" : "copy from the host that it waits for");
  memory_of(to).copy_(memory_of(from));
  return to;
}

at::Scalar item(const at::Tensor& tensor) {
  host_waits("item()");
  return memory_of(tensor).item();
}

// ---- all other operations

const std::set<std::string> SHAPES_OF_VALUES = {
    "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::repeat_interleave", "aten::bincount", "aten::is_nonzero"};

at::Generator own_generator;  // operations on the device draw from it, except for dropout, which names none

struct Call {
  std::vector<std::pair<at::Tensor, at::Tensor>> swapped;  // alias, original
  bool device = false, host = false;
  bool masks = false;  // among the indices

  at::Tensor in(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != GPU) {
      host |= tensor.is_cpu() && tensor.dim() > 0;
      return tensor;
    }
    device = true;
    // An empty tensor may be an output that the kernel is to resize.
    auto here = tensor.numel() ? memory_of(tensor)
                               : at::empty(tensor.sizes(), tensor.options().device(at::kCPU).requires_grad(false));
    swapped.emplace_back(here, tensor);
    return here;
  }

  at::Tensor out(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    for (auto& [here, original] : swapped)
      if (here.is_same(tensor)) {
        if (!original.numel() && here.numel()) become(original, on_device(here));
        return original;
      }
    return on_device(tensor);
  }
};

void run_on_cpu(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const auto& schema = operation.schema();
  const auto& name = schema.name();
  Call call;
  for (size_t i = stack->size() - schema.arguments().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = call.in(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(call.in(tensor));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        call.masks |= tensor && tensor->defined() && tensor->device().type() == GPU && tensor->scalar_type() == at::kBool;
        list.push_back(tensor ? std::optional<at::Tensor>(call.in(*tensor)) : std::nullopt);
      }
      value = list;
    } else if (value.isDevice() && value.toDevice().type() == GPU) {
      value = c10::Device(at::kCPU);
      call.device = true;
    }
  }
  for (size_t i = 0, first = stack->size() - schema.arguments().size(); i < schema.arguments().size(); ++i) {
    auto& value = (*stack)[first + i];
    if (call.device && value.isNone() && schema.arguments()[i].name() == "generator") value = own_generator;
  }
  const bool indexes = name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_";
  TORCH_CHECK(!(call.device && call.host && !indexes), "Expected all tensors to be on the same device, but found at "
              "least two devices, gpu:0 and cpu, in ", schema.operator_name());
  if (SHAPES_OF_VALUES.count(name) || (indexes && call.masks)) host_waits(name);
  for (const auto& result : schema.returns())
    TORCH_CHECK(!result.alias_info() || result.alias_info()->isWrite(), "the emulated GPU lacks the view ",
                schema.operator_name());
  operation.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  if (!call.device) return;
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = call.out(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(call.out(tensor));
      value = list;
    }
  }
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("resize_", resize_);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("_copy_from", copy_from);
  library.impl("_local_scalar_dense", item);
  // Made of other operations unless a device has its own; the CPU has, and values are to be the CPU's.
  for (auto name : {"native_layer_norm", "native_layer_norm_backward", "native_dropout", "native_dropout_backward"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

// Autocast: matrix products in the low type, what needs the range in float32, as on GPUs.
template <bool low>
void cast(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard once(c10::DispatchKey::AutocastPrivateUse1);
  const auto type = low ? at::autocast::get_autocast_dtype(GPU) : at::kFloat;
  for (size_t i = stack->size() - operation.schema().arguments().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) value = at::autocast::cached_cast(type, value.toTensor(), GPU);
  }
  operation.callBoxed(stack);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
  for (auto name : {"linear", "matmul", "addmm", "mm", "bmm", "baddbmm", "scaled_dot_product_attention"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&cast<true>>());
  for (auto name : {"layer_norm", "nll_loss", "cross_entropy_loss", "softmax.int", "log_softmax.int"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&cast<false>>());
}

TORCH_LIBRARY(emulated_gpu, library) {
  library.def("alias(Tensor(a) tensor) -> Tensor(a)");
  library.impl("alias", c10::DispatchKey::PrivateUse1, memory_of);
  library.def("draw_from", [](at::Generator generator) { own_generator = std::move(generator); });
}

}  // namespace

extern "C" void emulated_gpu_start() {
  c10::SetAllocator(GPU, &device_memory);
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

extern "C" int64_t emulated_gpu_most_held() { return most_held; }

extern "C" void emulated_gpu_forget_most_held() { most_held = held.load(); }

extern "C" void emulated_gpu_report(Report callback) { report = callback; }
