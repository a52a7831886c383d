// Rings of stages in shared memory, which one side fills and the other reads in the same order. A stage has two
// barriers: full, what it holds is there; empty, all have read it.
//
// COUNT stages, whose barriers lie from the offset AT on: all full ones, then all empty ones. PARTS of a stage are
// filled and read apart, each with its pair of barriers. SLIM: a place takes one register, not two, and an instruction
// more where it is used; COUNT is a power of 2.
template <int COUNT, u32 AT, int PARTS = 1, bool SLIM = false> struct Ring {
  static constexpr u32 END = AT + 16 * COUNT * PARTS;
  u32 base, at, parity;

  // A place at the first stage. `parity`: 1 of who fills, 0 of who reads.
  METHOD Ring(u32 base, u32 parity) : base(base), at(SLIM ? COUNT * parity : 0), parity(parity) {}
  METHOD u32 stage() const { return SLIM ? at % COUNT : at; }
  METHOD u32 phase() const { return SLIM ? at / COUNT & 1 : parity; }
  METHOD void advance() {
    if (SLIM) at++;
    else if (++at == COUNT) at = 0, parity ^= 1;
  }
  METHOD u32 before() const { return at ? at - 1 : COUNT - 1; }  // the stage before; not SLIM

  METHOD u32 full(int part = 0) const { return base + AT + 16 * COUNT * part + 8 * stage(); }
  METHOD u32 empty(int part = 0) const { return empty_of(stage(), part); }
  METHOD u32 empty_of(u32 stage, int part = 0) const { return base + AT + 8 * COUNT * (2 * part + 1) + 8 * stage; }
  METHOD void wait_full(int part = 0) const { wait(full(part), phase()); }
  METHOD void wait_empty(int part = 0) const { wait(empty(part), phase()); }
  // Waits until the stage is empty, and expects so many bytes on the barrier that it returns.
  METHOD u32 fill(u32 bytes, int part = 0) const {
    wait_empty(part), expect_bytes(full(part), bytes);
    return full(part);
  }
  // A warp has read a stage.
  METHOD void release(u32 stage, int part = 0) const { warp_arrive(empty_of(stage, part)); }
  METHOD void release() const { release(stage()); }
  // By one thread: so many arrive when a stage is filled, and when it has been read.
  static METHOD void init(u32 base, int fills, int reads, int part = 0) {
    for (int i = 0; i < COUNT; i++) {
      const u32 at = base + AT + 16 * COUNT * part + 8 * i;
      barrier_init(at, fills), barrier_init(at + 8 * COUNT, reads);
    }
  }
};
