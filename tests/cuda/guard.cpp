// In a PyTorch that is built for CPUs: what autograd and autocast ask the CUDA library, answered as by a machine with one idle
// GPU. With it fake tensors (torch._subclasses.fake_tensor) can be "on cuda": shapes, formats and devices are computed, and
// nothing else. To be loaded before PyTorch's Python half; tests/cuda/pretend.py does it.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device gpu(c10::DeviceType::CUDA, 0);
const c10::Stream only_stream(c10::Stream::DEFAULT, gpu);

struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return gpu; }
  c10::Device exchangeDevice(c10::Device) const override { return gpu; }
  c10::Stream getStream(c10::Device) const noexcept override { return only_stream; }
  c10::Stream getNewStream(c10::Device, int) const override { return only_stream; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return only_stream; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

struct Hooks : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
};

c10::impl::DeviceGuardImplRegistrar guard(c10::DeviceType::CUDA, new Guard);

}  // namespace

namespace at {
using ::Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}  // namespace at
