// Arrays beyond which nobody may read or write: at one end, by chance the first or the last, is memory without access,
// and the bytes at the other are checked.
#include <csignal>
#include <sys/mman.h>
#include <unistd.h>

class Memory {
  static constexpr size_t PAGE = 1 << 16, SLOT = 1 << 23, SLOTS = 32, EDGE = 4096;
  u8* base;
  struct Taken { u8 *begin, *end; };  // bytes at the other end
  std::vector<Taken> taken;

 public:
  static constexpr u8 UNTOUCHED = 0xa7;
  Memory() {
    base = (u8*)mmap(nullptr, SLOTS * SLOT, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (size_t i = 0; i < SLOTS; i++)
      if (mprotect(base + i * SLOT + PAGE, SLOT - 2 * PAGE, PROT_READ | PROT_WRITE)) abort();
  }
  // So many elements, whose bytes are all UNTOUCHED.
  template <class T> T* array(size_t count) {
    const size_t bytes = count * sizeof(T);
    if (taken.size() == SLOTS || bytes > SLOT - 2 * PAGE - EDGE) abort();
    u8 *first = base + taken.size() * SLOT + PAGE, *last = first + SLOT - 2 * PAGE;
    const bool at_end = below(2);
    u8* own = at_end ? last - bytes : first;
    taken.push_back(at_end ? Taken{own - EDGE, own} : Taken{own + bytes, own + bytes + EDGE});
    memset(own - (at_end ? EDGE : 0), UNTOUCHED, bytes + EDGE);
    return (T*)own;
  }
  template <class T> T* copy(const std::vector<T>& list) {
    T* own = array<T>(list.size());
    std::copy(list.begin(), list.end(), own);
    return own;
  }
  bool is_intact() const {
    auto untouched = [](u8 x) { return x == UNTOUCHED; };
    return std::all_of(taken.begin(), taken.end(), [&](const Taken& x) { return std::all_of(x.begin, x.end, untouched); });
  }
  void clear() { taken.clear(); }
};
static Memory memory;
