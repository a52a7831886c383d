// Operands of products of matrices on their way through registers into shared memory.

// Rows of an operand along which the reduction runs. A thread copies 8 numbers of row `t % 128`; `row` 0: none.
template <class T> struct Along {
  const T* row;
  int width;
  bool whole;
  METHOD void fetch(float (&x)[8], int first) const {
    const int k = first + threadIdx.x / SIDE * 8, there = row ? width - k : 0;
    four(x, row + k, there, whole), four(x + 4, row + k + 4, there - 4, whole);
  }
  METHOD void put(float (&to)[DEPTH][SIDE], const float (&x)[8]) const {
    UNROLL(i, 8) to[threadIdx.x / SIDE * 8 + i][threadIdx.x % SIDE] = x[i];
  }
};

// Rows of an operand that the reduction takes one by one: `rows(k)` is row k from the tile's first column on, from
// which there are `columns`.
template <class T, class F> struct Across {
  F rows;
  int count, columns;
  bool whole;
  METHOD void fetch(float (&x)[8], int first) const {
    const int k = first + threadIdx.x / 16, column = threadIdx.x % 16 * 4;
    const T* from = k < count ? rows(k) : 0;
    const int there = k < count ? columns - column : 0;
    four(x, from + column, there, whole), four(x + 4, from + column + 64, there - 64, whole);
  }
  METHOD void put(float (&to)[DEPTH][SIDE], const float (&x)[8]) const {
    const int k = threadIdx.x / 16, column = threadIdx.x % 16 * 4;
    *(float4*)&to[k][column] = make_float4(x[0], x[1], x[2], x[3]);
    *(float4*)&to[k][column + 64] = make_float4(x[4], x[5], x[6], x[7]);
  }
};
template <class T, class F> DEV Across<T, F> across(F rows, int count, int columns, bool whole) { return {rows, count, columns, whole}; }
