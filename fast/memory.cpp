// Large tensors in one region of memory, lowest free place first.
//
// In malloc's heap the small things that stay (Python's objects, prepared products) end up between the large tensors that
// die with a step. The gaps that the tensors leave never join, and with batches of ever new shapes the heap grows for thousands
// of steps. Here what stays (weights, and what the optimiser keeps) is there from the first step on, and the rest is free after
// every step. The kernel is asked for pages of 2 MiB; like malloc under engine/memory.py, the region keeps what it once had.

#include <c10/core/CPUAllocator.h>
#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <unordered_map>

namespace {

constexpr size_t kSmallest = 64 << 10, kAlignment = 64;  // bytes; what is smaller is malloc's

struct Region final : c10::Allocator {
  char *begin, *end;
  c10::Allocator* others;                 // PyTorch's own, for what is small or does not fit
  std::mutex mutex;
  std::map<char*, size_t> free_blocks;    // place → bytes, never two side by side
  std::unordered_map<char*, size_t> used;

  c10::DataPtr allocate(size_t bytes) override {
    void* place = bytes < kSmallest ? nullptr : allocate_block((bytes + kAlignment - 1) / kAlignment * kAlignment);
    if (!place) place = others->raw_allocate(bytes);
    return {place, place, &release, c10::Device(c10::kCPU)};
  }

  char* allocate_block(size_t bytes) {
    std::lock_guard<std::mutex> alone(mutex);
    for (auto block = free_blocks.begin(); block != free_blocks.end(); ++block) {
      const auto [place, size] = *block;
      if (size < bytes) continue;
      free_blocks.erase(block);
      if (size > bytes) free_blocks[place + bytes] = size - bytes;
      used[place] = bytes;
      return place;
    }
    return nullptr;
  }

  void release_block(char* place) {
    std::lock_guard<std::mutex> alone(mutex);
    auto block = free_blocks.emplace(place, used[place]).first;
    used.erase(place);
    if (const auto next = std::next(block); next != free_blocks.end() && block->first + block->second == next->first) {
      block->second += next->second;
      free_blocks.erase(next);
    }
    if (block == free_blocks.begin()) return;
    if (const auto before = std::prev(block); before->first + before->second == place) {
      before->second += block->second;
      free_blocks.erase(block);
    }
  }

  static void release(void* place);
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

Region* region = nullptr;  // never deleted: tensors are freed until the process exits

void Region::release(void* place) {
  const bool ours = place >= region->begin && place < region->end;
  ours ? region->release_block(static_cast<char*>(place)) : region->others->raw_deallocate(place);
}

}  // namespace

// From now on PyTorch's tensors on the CPU live there. Returns 0 if the system cannot provide the region. A second call changes
// nothing.
extern "C" int keep_tensors_together() {
  if (region) return 1;
  rlimit addresses;  // where they are limited, the region would leave none for anything else
  if (getrlimit(RLIMIT_AS, &addresses) || addresses.rlim_cur != RLIM_INFINITY) return 0;
  if (std::ifstream("/proc/sys/vm/overcommit_memory").get() == '2') return 0;  // addresses count as memory there
  const size_t size = size_t(sysconf(_SC_PHYS_PAGES)) * size_t(sysconf(_SC_PAGESIZE));  // addresses; memory when touched
  void* begin = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (begin == MAP_FAILED) return 0;
  madvise(begin, size, MADV_HUGEPAGE);
  region = new Region;
  region->begin = static_cast<char*>(begin);
  region->end = region->begin + size;
  region->free_blocks[region->begin] = size;
  region->others = c10::GetCPUAllocator();
  // A data loader's process, forked while another thread holds the lock, would deadlock.
  pthread_atfork([] { region->mutex.lock(); }, [] { region->mutex.unlock(); }, [] { region->mutex.unlock(); });
  c10::SetCPUAllocator(region, 1);
  malloc_trim(0);  // return to the system what earlier work, such as tokenising, has freed
  return 1;
}
