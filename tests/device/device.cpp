// A simulated accelerator on PyTorch's dispatch key PrivateUse1.
//
// Kernels are those of the CPU, through at::native::cpu_fallback, so results equal those of the CPU. Everything else
// behaves as on an accelerator: memory that the CPU cannot read, no mixing with CPU tensors, fresh memory that holds
// NaN, a random generator of its own. Every launch and every synchronization is reported to a Python function.

#include <sys/mman.h>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/SparseTensorUtils.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/values_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

namespace py = pybind11;
using at::Tensor;
const c10::Device DEVICE(c10::DeviceType::PrivateUse1, 0);

bool is_ours(const Tensor& t) { return t.defined() && t.device().type() == DEVICE.type(); }

// ---- switches and reports -------------------------------------------------------------------------------------------

bool opaque_addresses = false;     // data_ptr() of new memory is no address, as on MPS
bool refuses_float64 = false;      // as MPS
std::set<std::string> refused;     // operators that the device does not have
py::function* listener = nullptr;  // called with the kind of an event and the name of the operator

thread_local int silent = 0;  // above 0 within the simulation itself
struct Silence { Silence() { ++silent; } ~Silence() { --silent; } };

void report(const char* kind, const std::string& what) {
  if (silent || !listener) return;
  py::gil_scoped_acquire gil;
  (*listener)(kind, what);
}

// ---- memory ---------------------------------------------------------------------------------------------------------
// An opaque address is a number within reserved pages that nobody may read. `memory_of` knows the memory behind it.

std::mutex guard;
std::unordered_map<void*, void*> memory_of;

void* reserve_address() {
  static char* next = (char*)mmap(nullptr, size_t(1) << 36, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return next += 64;  // closer together than tensors are long
}

void release(void* address) {
  std::lock_guard<std::mutex> lock(guard);
  auto found = memory_of.find(address);
  if (found == memory_of.end()) return std::free(address);
  std::free(found->second);
  memory_of.erase(found);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, nullptr, &release, DEVICE};
    void* memory = nullptr;
    TORCH_CHECK(posix_memalign(&memory, 64, bytes) == 0, "sim: out of memory");
    std::memset(memory, 0xff, bytes);  // NaN
    if (!opaque_addresses) return {memory, memory, &release, DEVICE};
    std::lock_guard<std::mutex> lock(guard);
    void* address = reserve_address();
    memory_of[address] = memory;
    return {address, address, &release, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void*, const void*, std::size_t) const override { TORCH_CHECK(false, "sim: copy_data"); }
};
Memory allocator;

char* memory_behind(const c10::Storage& storage) {
  std::lock_guard<std::mutex> lock(guard);
  auto found = memory_of.find(storage.mutable_data());
  return (char*)(found == memory_of.end() ? storage.mutable_data() : found->second);
}

// The same memory as a tensor of the CPU; a tensor of the CPU as it is.
Tensor on_cpu(const Tensor& t) {
  if (!is_ours(t)) return t;
  static char nothing[64];
  char* start = memory_behind(t.storage());
  start = start ? start + t.storage_offset() * t.element_size() : nothing;
  return at::from_blob(start, t.sizes(), t.strides(), t.options().device(at::kCPU).requires_grad(false));
}

void check_dtype(at::ScalarType dtype) {
  TORCH_CHECK_TYPE(!refuses_float64 || silent || (dtype != at::kDouble && dtype != at::kComplexDouble),
                   "Cannot convert a sim Tensor to float64 dtype as the sim framework doesn't support float64. Please use "
                   "float32 instead.");
}

constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  check_dtype(c10::dtype_or_default(dtype));
  return at::detail::empty_generic(size, &allocator, KEYS, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  check_dtype(c10::dtype_or_default(dtype));
  return at::detail::empty_strided_generic(size, stride, &allocator, KEYS, c10::dtype_or_default(dtype));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (is_ours(from) && is_ours(to)) report("launch", "aten::copy_");
  else if (is_ours(from)) report("sync", "copy to host");
  else report(non_blocking ? "copy" : "sync", "copy to device");
  Silence here;
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

void grow(const c10::Storage& storage, size_t bytes) {
  if (bytes <= storage.nbytes()) return;
  char* old = memory_behind(storage);
  auto before = storage.unsafeGetStorageImpl()->set_data_ptr(allocator.allocate(bytes));
  if (storage.nbytes()) std::memcpy(memory_behind(storage), old, storage.nbytes());
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  if (self.sizes() == size) return self;
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  grow(self.storage(), (self.numel() + self.storage_offset()) * self.element_size());
  return self;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (is_ours(to)) resize_(to, from.sizes(), {});
  else to.resize_(from.sizes());
  return copy_from(from, to, false);
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.size() == size.size()) impl->set_sizes_and_strides(size, stride);
  else impl->set_sizes_contiguous(size);
  return self;
}

at::Scalar item(const Tensor& self) {
  report("sync", "item");
  Silence here;
  return on_cpu(self).item();
}

// ---- kernels --------------------------------------------------------------------------------------------------------

// Operators whose result the host needs before it can go on: CUDA waits within them.
const std::set<std::string> WAITS = {"aten::equal", "aten::nonzero", "aten::_unique2", "aten::unique_dim",
  "aten::unique_consecutive", "aten::masked_select", "aten::bincount", "aten::_coalesce", "aten::_linalg_check_errors"};
const std::set<std::string> TAKES_HOST_TENSORS = {"aten::index", "aten::index_put", "aten::index_put_",
  "aten::_index_put_impl_", "aten::_foreach_copy_", "aten::_pin_memory"};

void launch(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& name = op.schema().name();
  const auto arguments = torch::jit::last(stack, op.schema().arguments().size());
  auto check = [&](const Tensor& t) {
    TORCH_CHECK(!t.defined() || is_ours(t) || (t.dim() == 0 && name != "aten::cat") || TAKES_HOST_TENSORS.count(name),
                "Expected all tensors to be on the same device, but found at least two devices, sim:0 and ", t.device(),
                " (in ", name, ")");
    if (is_ours(t)) check_dtype(t.scalar_type());
  };
  for (const auto& value : arguments) {
    if (value.isTensor()) check(value.toTensor());
    else if (value.isTensorList()) for (const Tensor& t : value.toTensorVector()) check(t);
  }
  TORCH_CHECK_NOT_IMPLEMENTED(silent || !refused.count(name), "The operator '", name, "' is not currently implemented for "
                              "the sim device.");
  report("launch", name);
  const bool unknown_size = name == "aten::repeat_interleave" && arguments.back().isNone();
  if (WAITS.count(name) || unknown_size) report("sync", name);
}

at::Generator& generator() {
  static at::Generator own = at::detail::createCPUGenerator(12345);
  return own;
}

// Within, a random operator draws from the generator of the device instead of that of the CPU.
struct Draw {
  bool random;
  at::Generator cpu = at::detail::getDefaultCPUGenerator();
  Tensor before;
  Draw(const c10::OperatorHandle& op) : random(op.hasTag(at::Tag::nondeterministic_seeded)) {
    if (!random) return;
    before = cpu.get_state();
    cpu.set_state(generator().get_state());
  }
  ~Draw() {
    if (!random) return;
    generator().set_state(cpu.get_state());
    cpu.set_state(before);
  }
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  launch(op, *stack);
  {
    Silence here;
    Draw draw(op);
    at::native::cpu_fallback(op, stack);
  }
  for (const auto& value : torch::jit::last(*stack, op.schema().returns().size()))
    if (value.isTensor() && is_ours(value.toTensor())) check_dtype(value.toTensor().scalar_type());
}

// Indices and values of a sparse tensor are on the device. Operators run on copies of them.
Tensor sparse_to(const Tensor& t, at::Device device) {
  return at::_sparse_coo_tensor_unsafe(at::native::_indices_sparse(t).to(device), at::native::_values_sparse(t).to(device),
                                       t.sizes())._coalesced_(t.is_coalesced());
}

void sparse_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  launch(op, *stack);
  Silence here;
  const auto& schema = op.schema();
  const size_t first = stack->size() - schema.arguments().size();
  std::vector<std::pair<Tensor, Tensor>> written;  // a tensor of the device and its copy
  for (size_t k = first; k < stack->size(); ++k) {
    auto& value = (*stack)[k];
    auto copy_of = [&](const Tensor& t) {
      if (!is_ours(t)) return t;
      Tensor copy = t.is_sparse() ? sparse_to(t, at::kCPU) : t.cpu();
      const auto* alias = schema.arguments()[k - first].alias_info();
      if (alias && alias->isWrite()) written.emplace_back(t, copy);
      return copy;
    };
    if (value.isTensor()) value = copy_of(value.toTensor());
    else if (value.isDevice()) value = at::Device(at::kCPU);
    else if (value.isTensorList()) {
      std::vector<Tensor> all;
      for (const Tensor& t : value.toTensorVector()) all.push_back(copy_of(t));
      value = all;
    }
  }
  op.callBoxed(stack);
  for (auto& [ours, copy] : written) {
    if (!ours.is_sparse()) { ours.copy_(copy); continue; }
    at::sparse::get_sparse_impl(ours)->set_indices_and_values_unsafe(copy._indices().to(DEVICE), copy._values().to(DEVICE));
    ours._coalesced_(copy.is_coalesced());
  }
  for (size_t k = stack->size() - schema.returns().size(); k < stack->size(); ++k) {
    auto& value = (*stack)[k];
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    Tensor t = value.toTensor(), result;
    for (auto& [ours, copy] : written) if (copy.is_same(t)) result = ours;
    value = result.defined() ? result : t.is_sparse() ? sparse_to(t, DEVICE) : t.to(DEVICE);
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&sparse_fallback>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize_);
  m.impl("_local_scalar_dense", item);
  m.impl("view", at::native::view);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", [](Tensor& self, at::Storage source) -> Tensor& {
    int64_t size = source.nbytes() / self.element_size();
    return set_storage(self, std::move(source), 0, {size}, {});
  });
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("_sparse_coo_tensor_with_dims_and_tensors", at::native::new_with_dims_and_tensor_sparse_symint);
  m.impl("_indices", at::native::_indices_sparse);
  m.impl("_values", at::native::_values_sparse);
  m.impl("indices", at::native::indices_sparse);
  m.impl("values", at::native::values_sparse);
  m.impl("sparse_dim", at::native::sparse_dim_sparse);
  m.impl("dense_dim", at::native::dense_dim_sparse);
  m.impl("_dimI", at::native::sparse_dim_sparse);
  m.impl("_dimV", at::native::dense_dim_sparse);
  m.impl("_nnz", at::native::_nnz_sparse);
  m.impl("is_coalesced", at::native::is_coalesced_sparse);
  m.impl("_coalesced_", at::native::_coalesced_sparse_);
}

// Composite operators go before a fallback. Of those that are one kernel on CUDA, register the fallback itself.
void register_single_kernels() {
  static torch::Library dense(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  static torch::Library sparse(torch::Library::IMPL, "aten", c10::DispatchKey::SparsePrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const std::string own = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    if (own.rfind("_foreach_", 0) == 0 && own.find("out") == std::string::npos)
      dense.impl(own.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
    auto op = dispatcher.findOp(name);
    if (op->hasKernelForDispatchKey(c10::DispatchKey::SparseCPU) &&
        !op->hasKernelForDispatchKey(c10::DispatchKey::SparsePrivateUse1))
      sparse.impl(own.c_str(), torch::CppFunction::makeFromBoxedFunction<&sparse_fallback>());
  }
}

// ---- the device itself ------------------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return DEVICE.type(); }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::Stream getNewStream(c10::Device, int = 0) const override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { report("sync", "stream"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { report("sync", "device"); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  at::Device getDeviceFromPtr(void*) const override { return DEVICE; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { grow(storage, bytes); }
};

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(DEVICE.type(), &allocator);
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  register_single_kernels();
  m.def("use_opaque_addresses", [](bool on) { opaque_addresses = on; });
  m.def("refuse_float64", [](bool on) { refuses_float64 = on; });
  m.def("refuse", [](std::set<std::string> names) { refused = std::move(names); });
  m.def("report", report);
  m.def("silence", [](bool on) { silent += on ? 1 : -1; });
  m.def("listen", [](py::object to) { listener = to.is_none() ? nullptr : new py::function(to); });
  m.def("get_rng_state", [] { return generator().get_state(); });
  m.def("set_rng_state", [](const Tensor& state) { generator().set_state(state); });
  m.def("manual_seed", [](uint64_t seed) { generator().set_current_seed(seed); });
}
