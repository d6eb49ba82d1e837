// Attention of many queries on sm_90a (Shah et al. 2024, FlashAttention-3): CTAs that stay walk
// over tiles of 64 queries a warpgroup of one head. One thread copies queries, and keys and values
// into two rings of blocks; the other warpgroups have logits, softmax and sums in registers. While
// one takes its softmax, another has the tensor cores: it multiplies its queries with a block of
// keys and the weights of the block before with its values.
//
// The softmax is what there is to save at: a row's largest logit is looked for in its first block
// and where keys are masked; elsewhere only if a sum of weights shows that it was too small.
//
// A tile's blocks go from its last visible key to its first one, and no key but those is read.
#pragma once

#include "device/attention.cuh"
#include "device/ring.cuh"

namespace cufuse {

template <int kHeadDim_, int kWarpgroups_, int kKeys_, int kStages_>
struct AttentionShape {
  static constexpr int kHeadDim = kHeadDim_, kWarpgroups = kWarpgroups_;
  static constexpr int kKeys = kKeys_, kStages = kStages_;
  static constexpr int kQueries = kWarpgroups * 64;
  static constexpr int kThreads = (kWarpgroups + 1) * 128;
  static constexpr int kDim = (kHeadDim + 15) / 16 * 16;  // columns beyond head_dim are zeros
  // Rows lie in boxes of 64 columns: 128 bytes.
  static constexpr int kBoxes = (kDim + 63) / 64;
  static constexpr int kQueryBox = 64 * 128, kKeyBox = kKeys * 128;
  static constexpr int kQueryBytes = kBoxes * kQueryBox;  // of a warpgroup
  static constexpr int kBlockBytes = kBoxes * kKeyBox;
  static constexpr int kTileBytes = kWarpgroups * kQueryBytes;
  // The next tile's queries are copied ahead where there is room.
  static constexpr int kRingBytes = 2 * kStages * kBlockBytes;
  static constexpr int kQueryStages = 2 * kTileBytes + kRingBytes + 1024 <= 227 * 1024 ? 2 : 1;
  static constexpr int kKeysAt = kQueryStages * kTileBytes;
  static constexpr int kValuesAt = kKeysAt + kStages * kBlockBytes;
  static constexpr int kBarriersAt = kKeysAt + kRingBytes;
  static constexpr int kBarriers = 4 * kStages + 2 * kQueryStages * kWarpgroups;
  static constexpr int kSharedBytes = kBarriersAt + kBarriers * 8;
  // What 64 K registers leave: the warpgroup that copies needs few.
  static constexpr int kFew = kWarpgroups == 2 ? 24 : 32;
  static constexpr int kMany = kWarpgroups == 2 ? 240 : 160;
  static_assert(kHeadDim % 8 == 0, "rows are multiples of 16 bytes");
  static_assert(kKeys % 16 == 0 && kKeys <= 256, "a product sums over 16 keys");
  static_assert(kWarpgroups == 2 || kWarpgroups == 3, "registers are for two or three");
};

// How a product of query and key becomes a logit: by a positive scale alone, or as Logit has it.
enum class Logits { scaled, any };
// Warpgroups issue their products when they can, or in turns: while one has the tensor cores, the
// others take their softmax.
enum class Turns { free, fixed };

#if defined(CUFUSE_HOST) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Where things lie in shared memory, and the barriers of the copies.
template <typename Shape>
struct AttentionMemory {
  using Cursor = RingCursor<Shape::kStages>;
  using QueryCursor = RingCursor<Shape::kQueryStages>;

  static CUFUSE_DEVICE unsigned char* at(int byte) {
    return dynamic_shared<unsigned char>() + byte;
  }
  // Of a warpgroup; its results wait there too, for the threads that store them.
  static CUFUSE_DEVICE unsigned char* queries(const QueryCursor& cursor, int warpgroup) {
    return at(cursor.stage * Shape::kTileBytes + warpgroup * Shape::kQueryBytes);
  }
  static CUFUSE_DEVICE unsigned char* keys(const Cursor& cursor) {
    return at(Shape::kKeysAt + cursor.stage * Shape::kBlockBytes);
  }
  static CUFUSE_DEVICE unsigned char* values(const Cursor& cursor) {
    return at(Shape::kValuesAt + cursor.stage * Shape::kBlockBytes);
  }
  static CUFUSE_DEVICE u64* barrier(int number) {
    return reinterpret_cast<u64*>(at(Shape::kBarriersAt)) + number;
  }
  static CUFUSE_DEVICE u64* keys_full(int stage) { return barrier(stage); }
  static CUFUSE_DEVICE u64* keys_empty(int stage) { return barrier(Shape::kStages + stage); }
  static CUFUSE_DEVICE u64* values_full(int stage) { return barrier(2 * Shape::kStages + stage); }
  static CUFUSE_DEVICE u64* values_empty(int stage) { return barrier(3 * Shape::kStages + stage); }
  static CUFUSE_DEVICE u64* queries_full(int stage, int warpgroup) {
    return barrier(4 * Shape::kStages + 2 * stage * Shape::kWarpgroups + warpgroup);
  }
  static CUFUSE_DEVICE u64* queries_empty(int stage, int warpgroup) {
    return queries_full(stage, Shape::kWarpgroups + warpgroup);
  }

  // By one thread, before a barrier of the CTA.
  static CUFUSE_DEVICE void init() {
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      mbarrier_init(keys_full(stage), 1);
      mbarrier_init(keys_empty(stage), Shape::kWarpgroups * 4);
      mbarrier_init(values_full(stage), 1);
      mbarrier_init(values_empty(stage), Shape::kWarpgroups * 4);
    }
    for (int stage = 0; stage < Shape::kQueryStages; ++stage) {
      for (int warpgroup = 0; warpgroup < Shape::kWarpgroups; ++warpgroup) {
        mbarrier_init(queries_full(stage, warpgroup), 1);
        mbarrier_init(queries_empty(stage, warpgroup), 4);
      }
    }
    fence_mbarrier_init();
  }

  // By each warp that has read.
  static CUFUSE_DEVICE void release(u64* empty) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty);
  }
};

// Some queries of one head, and the keys that any of them sees, in blocks.
template <typename Shape>
struct QueryTile {
  int batch, head;
  int query;     // the first one; below 0 where the tile has rows before the queries
  int position;  // of that
  int length;    // of the sequence, but not beyond kv_len
  KeySpan keys;
  int blocks;

  // Blocks count from the end. All but block 0 follow each other from the first key on; block 0
  // ends with the last key and begins with some that block 1 has: no copy reaches beyond what is
  // seen.
  CUFUSE_DEVICE int own_key_of(int block) const {
    return keys.first + (blocks - 1 - block) * Shape::kKeys;
  }
  CUFUSE_DEVICE int key_of(int block) const {
    return block == 0 ? keys.last - Shape::kKeys : own_key_of(block);
  }
  // A block alone may reach below the first key, to values that nobody sees.
  CUFUSE_DEVICE int unseen() const {
    return blocks == 1 && keys.first > 0 ? max(Shape::kKeys - (keys.last - keys.first), 0) : 0;
  }
};

// The tiles of a CTA in their order.
template <typename Shape>
struct QueryTiles {
  int per_head, round;
  int batch;  // of `start` and `length`, which are read when another sequence comes
  int start, length;

  template <typename Args>
  CUFUSE_DEVICE explicit QueryTiles(const Args& args) {
    per_head = (args.q_len + Shape::kQueries - 1) / Shape::kQueries;
    round = 0;
    batch = -1;
  }

  // Tiles of a head end with its last query, and those that see most keys come first. CTAs take
  // them to and fro, so that each has some of all lengths; neighbours in time share keys and
  // values. Whether there is one more, and where its queries are.
  template <typename Args>
  CUFUSE_DEVICE bool find(const Args& args, QueryTile<Shape>& tile) const {
    const int heads = args.batch * args.n_heads;
    const int ctas = static_cast<int>(gridDim.x), cta = static_cast<int>(blockIdx.x);
    const int index = round * ctas + (round % 2 == 0 ? cta : ctas - 1 - cta);
    if (index >= heads * per_head) return false;
    const int from_end = index / heads;
    const int head = index - from_end * heads;
    tile.batch = head / args.n_heads;
    tile.head = head - tile.batch * args.n_heads;
    tile.query = args.q_len - (from_end + 1) * Shape::kQueries;
    return true;
  }

  // Take it. `same` is what makes a number the same for all who do.
  template <typename Args, typename F>
  CUFUSE_DEVICE bool take(const Args& args, QueryTile<Shape>& tile, F same) {
    if (!find(args, tile)) return false;
    ++round;
    if (tile.batch != batch) {
      batch = tile.batch;
      constexpr int kFar = 1 << 30;  // twice what there are of queries, keys and window
      start = same(args.start ? args.start[batch] : args.default_start);
      start = max(min(start, kFar), -kFar);
      length = args.lengths  ? same(args.lengths[batch])
               : args.causal ? start + args.q_len
                             : args.kv_len;
      length = max(min(length, args.kv_len), 0);
    }
    tile.length = length;
    tile.position = start + tile.query;
    tile.keys.first = first_key(args, tile, max(-tile.query, 0));
    tile.keys.last = end_key(args, tile, Shape::kQueries - 1);
    const int n_keys = max(tile.keys.last - tile.keys.first, 0);
    tile.blocks = (n_keys + Shape::kKeys - 1) / Shape::kKeys;
    return true;
  }

  // What a row of the tile sees, as visible_keys has it; nothing where the first key is not before
  // the end. Both grow with the row.
  template <typename Args>
  static CUFUSE_DEVICE int first_key(const Args& args, const QueryTile<Shape>& tile, int row) {
    return args.window > 0 ? max(tile.position + row + 1 - args.window, 0) : 0;
  }
  template <typename Args>
  static CUFUSE_DEVICE int end_key(const Args& args, const QueryTile<Shape>& tile, int row) {
    return args.causal ? max(min(tile.length, tile.position + row + 1), 0) : tile.length;
  }
};

// By one thread: all queries, keys and values of all tiles.
template <typename Shape, typename Args>
CUFUSE_DEVICE void copy_for_attention(const Args& args) {
  using Memory = AttentionMemory<Shape>;
  typename Memory::Cursor key_cursor, value_cursor;
  typename Memory::QueryCursor query_cursor;
  QueryTiles<Shape> tiles(args);
  QueryTile<Shape> tile;
  const auto copy_queries = [&] {
    QueryTile<Shape> next;
    if (!tiles.find(args, next)) return;
#pragma unroll 1
    for (int warpgroup = 0; warpgroup < Shape::kWarpgroups; ++warpgroup) {
      mbarrier_wait(Memory::queries_empty(query_cursor.stage, warpgroup), query_cursor.round ^ 1);
      u64* full = Memory::queries_full(query_cursor.stage, warpgroup);
      mbarrier_arrive_expect_tx(full, Shape::kQueryBytes);
      unsigned char* to = Memory::queries(query_cursor, warpgroup);
#pragma unroll
      for (int box = 0; box < Shape::kBoxes; ++box) {
        copy_tensor(to + box * Shape::kQueryBox, args.q_map, full, box * 64,
                    next.query + warpgroup * 64, next.head, next.batch);
      }
    }
    query_cursor.template advance<1>();
  };
  copy_queries();
  while (tiles.take(args, tile, [](int v) { return v; })) {
    const int kv_head = tile.head / (args.n_heads / args.n_kv_heads);
    const auto copy_block = [&](unsigned char* to, const TensorMap& map, u64* full, int block) {
      mbarrier_arrive_expect_tx(full, Shape::kBlockBytes);
      const int key = tile.key_of(block);
#pragma unroll
      for (int box = 0; box < Shape::kBoxes; ++box) {
        copy_tensor(to + box * Shape::kKeyBox, map, full, box * 64, key, kv_head, tile.batch);
      }
    };
    // The first keys, then keys and the values before them; the next queries when others can wait.
#pragma unroll 1
    for (int block = 0; block <= tile.blocks; ++block) {
      if (block < tile.blocks) {
        mbarrier_wait(Memory::keys_empty(key_cursor.stage), key_cursor.round ^ 1);
        copy_block(Memory::keys(key_cursor), args.k_map, Memory::keys_full(key_cursor.stage),
                   block);
        key_cursor.template advance<1>();
      }
      if (block > 0) {
        mbarrier_wait(Memory::values_empty(value_cursor.stage), value_cursor.round ^ 1);
        copy_block(Memory::values(value_cursor), args.v_map,
                   Memory::values_full(value_cursor.stage), block - 1);
        value_cursor.template advance<1>();
      }
      if (block == (Shape::kQueryStages == 1 ? tile.blocks : min(tile.blocks, 1))) copy_queries();
    }
  }
}

// Whose turn it is, where warpgroups take turns: one each for every block of a tile but the first.
template <typename Shape, Turns kTurns>
struct AttentionTurns {
  bool any = false;

  CUFUSE_DEVICE void begin(int warpgroup) {
    if constexpr (kTurns == Turns::fixed) {
      if (warpgroup > 0 || any) barrier_sync(1 + warpgroup, 256);
      any = true;
    }
  }
  CUFUSE_DEVICE void end(int warpgroup) {
    if constexpr (kTurns == Turns::fixed) {
      barrier_arrive(1 + (warpgroup + 1 == Shape::kWarpgroups ? 0 : warpgroup + 1), 256);
    }
  }
  // The last one to arrive meets the first warpgroup here.
  CUFUSE_DEVICE void finish(int warpgroup) {
    if constexpr (kTurns == Turns::fixed) {
      if (warpgroup == 0 && any) barrier_sync(1, 256);
    }
  }
};

// What a thread holds of a tile: two rows, `lane / 4` and 8 further on.
template <typename Shape>
struct AttentionState {
  float logits[Shape::kKeys / 2];
  u32 weights[Shape::kKeys / 16][4];  // the left operand of the product with the values
  float sums[Shape::kDim / 2];
  float base[2];   // what is subtracted from logits
  float total[2];  // of this thread's columns
};

// A row's base is its largest logit when it was chosen, and so much. It stays until a weight is
// more than 1: then the largest logit is higher than the base.
constexpr float kAbove = 4.0f;
constexpr float kLog2E = 1.4426950408889634f;

// By a warpgroup: start the products of its queries with a block of keys.
template <typename Shape, typename T>
CUFUSE_DEVICE void start_logits(AttentionState<Shape>& state,
                                const unsigned char* queries,
                                const unsigned char* keys) {
  const u64 a = wgmma_descriptor<128>(queries, 0, 1024);
  const u64 b = wgmma_descriptor<128>(keys, 0, 1024);
#pragma unroll
  for (int step = 0; step < Shape::kDim / 16; ++step) {
    wgmma<T>(state.logits, wgmma_advance(a, step / 4 * Shape::kQueryBox + step % 4 * 32),
             wgmma_advance(b, step / 4 * Shape::kKeyBox + step % 4 * 32), step > 0);
  }
  wgmma_commit();
}

// And of its weights with a block of values.
template <typename Shape, typename T>
CUFUSE_DEVICE void start_sums(AttentionState<Shape>& state, const unsigned char* values) {
  const u64 b = wgmma_descriptor<128>(values, Shape::kKeyBox, 1024);
#pragma unroll
  for (int step = 0; step < Shape::kKeys / 16; ++step) {
    wgmma<T, Major::mn>(state.sums, state.weights[step], wgmma_advance(b, step * 2048), true);
  }
  wgmma_commit();
}

// Logits in powers of 2: the factor that is still to come, where they are only scaled.
template <Logits kLogits, typename Args>
CUFUSE_DEVICE float logit_factor(const Args& args) {
  return kLogits == Logits::scaled ? args.scale * kLog2E : 1.0f;
}
template <Logits kLogits, int kCount, typename Args>
CUFUSE_DEVICE void finish_logits(float (&logits)[kCount], const Args& args) {
  if constexpr (kLogits == Logits::any) {
    const float scale = args.scale * kLog2E;
    const float twice = 2.0f * kLog2E * args.scale * args.inv_softcap;
    const float cap = args.softcap * kLog2E;
    if (args.softcap > 0.0f) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {  // cap * tanh(x / cap)
        logits[i] = fmaf(-cap, __fdividef(2.0f, 1.0f + exp2f(logits[i] * twice)), cap);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) logits[i] *= scale;
    }
  }
}

// Raise the bases of rows whose logits in this block are higher; sums and totals follow.
template <typename Shape>
CUFUSE_DEVICE void raise_bases(AttentionState<Shape>& state, float factor) {
  float rescale[2];
  bool raised = false;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float even = state.logits[2 * i], odd = state.logits[2 * i + 1];
#pragma unroll
    for (int n = 1; n < Shape::kKeys / 8; ++n) {
      even = fmaxf(even, state.logits[4 * n + 2 * i]);
      odd = fmaxf(odd, state.logits[4 * n + 2 * i + 1]);
    }
    float top = fmaxf(even, odd);
    top = fmaxf(top, __shfl_xor_sync(kFullMask, top, 1));
    top = fmaxf(top, __shfl_xor_sync(kFullMask, top, 2)) * factor;
    rescale[i] = 1.0f;
    if (top > state.base[i]) {
      rescale[i] = exp2f(state.base[i] - (top + kAbove));
      state.base[i] = top + kAbove;
      raised = true;
    }
    state.total[i] *= rescale[i];
  }
  if (!__any_sync(kFullMask, raised)) return;
#pragma unroll
  for (int i = 0; i < Shape::kDim / 2; ++i) state.sums[i] *= rescale[i / 2 % 2];
}

// Weights from logits, rounded: the accumulators' order is that of a left operand. `sum` is what a
// row's weights in this thread add up to.
template <typename Shape, typename T>
CUFUSE_DEVICE void weigh(AttentionState<Shape>& state,
                         float factor,
                         const float (&shift)[2],
                         float (&sum)[2]) {
  sum[0] = sum[1] = 0.0f;
#pragma unroll
  for (int step = 0; step < Shape::kKeys / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = &state.logits[8 * step + 2 * i];
      const float low = exp2f(fmaf(pair[0], factor, -shift[i % 2]));
      const float high = exp2f(fmaf(pair[1], factor, -shift[i % 2]));
      state.weights[step][i] = pair_from_floats<T>(low, high);
      sum[i % 2] += low + high;
    }
  }
}

// A block's weights from its logits. Those far above the base show in a row's sum, and so does a
// base of -inf: then bases are raised, and all is done again.
template <typename Shape, typename T>
CUFUSE_DEVICE void take_weights(AttentionState<Shape>& state, float factor, bool raise) {
  constexpr float kMost = 8192.0f;  // below half's largest value
  float sum[2];
#pragma unroll 1
  while (true) {
    float shift[2] = {state.base[0], state.base[1]};
    if (raise) {
      raise_bases(state, factor);
      shift[0] = softmax_shift(state.base[0]);
      shift[1] = softmax_shift(state.base[1]);
    }
    weigh<Shape, T>(state, factor, shift, sum);
    if (raise || !__any_sync(kFullMask, sum[0] > kMost || sum[1] > kMost)) break;
    raise = true;
  }
  state.total[0] += sum[0];
  state.total[1] += sum[1];
}

// Logits of keys that are not visible become -inf: seen(i)(j) tells whether row i sees the key of
// column j, less the thread's first column.
template <typename Shape, typename F>
CUFUSE_DEVICE void mask_keys(AttentionState<Shape>& state, F seen) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const auto sees = seen(i);
#pragma unroll
    for (int n = 0; n < Shape::kKeys / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& v = state.logits[4 * n + 2 * i + j];
        v = sees(n * 8 + j) ? v : minus_infinity();
      }
    }
  }
}

// Values that nobody sees become zeros: by all warpgroups that multiply, before anyone reads them.
template <typename Shape>
CUFUSE_DEVICE void clear_values(unsigned char* values, int rows) {
  for (int i = static_cast<int>(threadIdx.x); i < rows * 8 * Shape::kBoxes;
       i += Shape::kWarpgroups * 128) {
    const int row = i / 8 % rows, box = i / 8 / rows;
    *reinterpret_cast<uint4*>(values + box * Shape::kKeyBox + row * 128 + i % 8 * 16) =
        uint4{0, 0, 0, 0};
  }
  fence_proxy_async_shared();
  barrier_sync(1 + Shape::kWarpgroups, Shape::kWarpgroups * 128);
}

// By a warpgroup: divide by the totals, a sink's share included, and store. A query that sees no
// key gets zeros.
template <typename Shape, typename T, typename Args>
CUFUSE_DEVICE void store_attention(AttentionState<Shape>& state,
                                   const QueryTile<Shape>& tile,
                                   unsigned char* results,
                                   int warpgroup,
                                   const Args& args) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(threadIdx.x % 128 / 32);
  float scale[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float total = state.total[i];
    total += __shfl_xor_sync(kFullMask, total, 1);
    total += __shfl_xor_sync(kFullMask, total, 2);
    float share = 1.0f;
    if (args.sinks) {
      const float sink = to_float(args.sinks[tile.head]) * kLog2E;
      const float top = fmaxf(state.base[i], sink), shift = softmax_shift(top);
      share = exp2f(state.base[i] - shift);
      total = fmaf(total, share, exp2f(sink - shift));
    }
    scale[i] = state.base[i] == minus_infinity() ? 0.0f : share / total;
  }

  // A warp's 16 rows go through shared memory, so that its lanes store whole rows.
  const int place = (warp * 16 + lane % 16) * 128;
#pragma unroll
  for (int column = 0; column < Shape::kDim; column += 16) {
    const float* c = &state.sums[column / 2];
    const u32 pairs[4] = {pair_from_floats<T>(c[0] * scale[0], c[1] * scale[0]),
                          pair_from_floats<T>(c[2] * scale[1], c[3] * scale[1]),
                          pair_from_floats<T>(c[4] * scale[0], c[5] * scale[0]),
                          pair_from_floats<T>(c[6] * scale[1], c[7] * scale[1])};
    unsigned char* box = results + column / 64 * Shape::kQueryBox;
    store_matrix(box + swizzle<128>(place + column % 64 * 2 + lane / 16 * 16), pairs);
  }
  __syncwarp();
  constexpr int kPerRow = Shape::kHeadDim / 8;  // 16 bytes each
  const int query = tile.query + warpgroup * 64 + warp * 16;
  T* out =
      args.out + ((static_cast<i64>(tile.batch) * args.q_len + query) * args.n_heads + tile.head) *
                     Shape::kHeadDim;
  const i64 stride = static_cast<i64>(args.n_heads) * Shape::kHeadDim;
#pragma unroll
  for (int i = lane; i < 16 * kPerRow; i += 32) {
    const int row = i / kPerRow, chunk = i - row * kPerRow;
    const unsigned char* box = results + chunk / 8 * Shape::kQueryBox;
    const uint4 values = *reinterpret_cast<const uint4*>(
        box + swizzle<128>((warp * 16 + row) * 128 + chunk % 8 * 16));
    if (query + row >= 0) *reinterpret_cast<uint4*>(out + row * stride + chunk * 8) = values;
  }
}

// A warpgroup's part of a tile.
template <typename Shape>
struct QueryShare {
  QueryTile<Shape> tile;
  typename AttentionMemory<Shape>::QueryCursor queries;
  // The blocks that any of its rows sees, and of each of those blocks the keys that all rows see.
  int begin, end;
  int seen_first, seen_last;
};

// What a warpgroup that multiplies keeps from tile to tile.
template <typename Shape, typename T, Logits kLogits, Turns kTurns, typename Args>
struct AttentionWarpgroup {
  using Memory = AttentionMemory<Shape>;
  using Tiles = QueryTiles<Shape>;
  using Share = QueryShare<Shape>;
  using State = AttentionState<Shape>;

  const Args& args;
  int warpgroup;
  Tiles tiles;
  AttentionTurns<Shape, kTurns> turns;
  typename Memory::Cursor key_cursor, value_cursor;
  typename Memory::QueryCursor query_cursor;

  CUFUSE_DEVICE AttentionWarpgroup(const Args& args, int warpgroup)
      : args(args), warpgroup(warpgroup), tiles(args) {}

  CUFUSE_DEVICE void wait_for_keys() const {
    mbarrier_wait(Memory::keys_full(key_cursor.stage), key_cursor.round);
  }
  CUFUSE_DEVICE void wait_for_values() const {
    mbarrier_wait(Memory::values_full(value_cursor.stage), value_cursor.round);
  }
  CUFUSE_DEVICE void release_keys() {
    Memory::release(Memory::keys_empty(key_cursor.stage));
    key_cursor.template advance<1>();
  }
  CUFUSE_DEVICE void release_values() {
    Memory::release(Memory::values_empty(value_cursor.stage));
    value_cursor.template advance<1>();
  }
  CUFUSE_DEVICE void skip(int block) {
    if (block > 0) {
      turns.begin(warpgroup);
      turns.end(warpgroup);
    }
    wait_for_keys();
    wait_for_values();
    __syncwarp();  // before one lane releases: no product lets them meet
    release_keys();
    release_values();
  }

  // The next tile, if there is one.
  CUFUSE_DEVICE bool take(Share& share) {
    if (!tiles.take(args, share.tile, uniform)) return false;
    share.queries = query_cursor;
    query_cursor.template advance<1>();
    const QueryTile<Shape>& tile = share.tile;
    const int first_row = max(warpgroup * 64, -tile.query), last_row = warpgroup * 64 + 63;
    const int first = Tiles::first_key(args, tile, first_row);
    const int last = Tiles::end_key(args, tile, last_row);
    const int own = tile.own_key_of(0);
    share.begin = last > own ? 0 : (own - last) / Shape::kKeys + 1;
    share.end = (max(own - first, 0) + Shape::kKeys - 1) / Shape::kKeys + 1;
    if (first_row > last_row || last <= first) share.begin = share.end = tile.blocks;
    share.seen_first = Tiles::first_key(args, tile, last_row);
    share.seen_last = Tiles::end_key(args, tile, first_row);
    return true;
  }

  // Whether the first products can start while the results of the tile before are on their way: no
  // block that others have to leave is waited for.
  static CUFUSE_DEVICE bool starts_early(const Share& share) {
    return Shape::kQueryStages > 1 && share.begin <= 1 && share.begin < share.end &&
           share.tile.unseen() == 0;
  }

  // Come to the first block that is seen.
  CUFUSE_DEVICE void approach(const Share& share) {
    if (share.tile.unseen() > 0) {
      wait_for_values();
      clear_values<Shape>(Memory::values(value_cursor), share.tile.unseen());
    }
    mbarrier_wait(Memory::queries_full(share.queries.stage, warpgroup), share.queries.round);
#pragma unroll 1
    for (int block = 0; block < share.begin; ++block) skip(block);
  }

  // Multiply the queries with it; f() is done meanwhile.
  template <typename F>
  CUFUSE_DEVICE void multiply_first(State& state, const Share& share, F f) {
    if (share.begin > 0) turns.begin(warpgroup);
    wait_for_keys();
    wgmma_fence(state.logits);
    start_logits<Shape, T>(state, Memory::queries(share.queries, warpgroup),
                           Memory::keys(key_cursor));
    if (share.begin > 0) turns.end(warpgroup);
    f();
    wgmma_wait<0>(state.logits);
    release_keys();
  }
  CUFUSE_DEVICE void start(State& state, const Share& share) {
    approach(share);
    if (share.begin < share.end) multiply_first(state, share, [] {});
  }

  // Logits of keys that a row does not see, and of those that another block has, become -inf. Only
  // blocks at the edges of what is visible look at each key; returns whether this one is.
  CUFUSE_DEVICE bool mask(State& state, const Share& share, int block) const {
    const QueryTile<Shape>& tile = share.tile;
    const int key = tile.key_of(block), own = tile.own_key_of(block);
    const bool first_edge = max(own, share.seen_first) > key;
    const bool last_edge = share.seen_last < key + Shape::kKeys;
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int row = warpgroup * 64 + static_cast<int>(threadIdx.x % 128 / 32) * 16 + lane / 4;
    const int column = key + lane % 4 * 2;
    if (first_edge) {
      mask_keys<Shape>(state, [&](int i) {
        const int first = max(own, Tiles::first_key(args, tile, row + i * 8)) - column;
        return [=](int j) { return j >= first; };
      });
    }
    if (last_edge) {
      mask_keys<Shape>(state, [&](int i) {
        const int last = Tiles::end_key(args, tile, row + i * 8) - column;
        return [=](int j) { return j < last; };
      });
    }
    return first_edge || last_edge;
  }

  // All that comes after `start`, up to sums, bases and totals.
  CUFUSE_DEVICE void attend(State& state, const Share& share) {
#pragma unroll
    for (int i = 0; i < Shape::kDim / 2; ++i) state.sums[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      state.base[i] = minus_infinity();
      state.total[i] = 0.0f;
    }
    if (share.begin < share.end) {
      const float factor = logit_factor<kLogits>(args);
      const unsigned char* queries = Memory::queries(share.queries, warpgroup);
      finish_logits<kLogits>(state.logits, args);
      mask(state, share, share.begin);
      take_weights<Shape, T>(state, factor, true);
#pragma unroll 1
      for (int block = share.begin + 1; block < share.end; ++block) {
        turns.begin(warpgroup);
        wait_for_keys();
        wgmma_fence(state.logits, state.weights, state.sums);
        start_logits<Shape, T>(state, queries, Memory::keys(key_cursor));
        wait_for_values();
        wgmma_fence();
        start_sums<Shape, T>(state, Memory::values(value_cursor));
        turns.end(warpgroup);
        wgmma_wait<1>(state.logits);
        release_keys();
        finish_logits<kLogits>(state.logits, args);
        const bool masked = mask(state, share, block);
        wgmma_wait<0>(state.sums);
        release_values();
        take_weights<Shape, T>(state, factor, masked);
      }
      wait_for_values();
      wgmma_fence(state.weights, state.sums);
      start_sums<Shape, T>(state, Memory::values(value_cursor));
      wgmma_wait<0>(state.sums);
      release_values();
    }
#pragma unroll 1
    for (int block = share.end; block < share.tile.blocks; ++block) skip(block);
  }

  // Store the results and give the queries' memory, where they waited, back.
  CUFUSE_DEVICE void finish(State& state, const Share& share) {
    store_attention<Shape, T>(state, share.tile, Memory::queries(share.queries, warpgroup),
                              warpgroup, args);
    fence_proxy_async_shared();
    __syncwarp();
    Memory::release(Memory::queries_empty(share.queries.stage, warpgroup));
  }

  CUFUSE_DEVICE void run() {
    State state;
    Share share, next;
    bool more = take(share);
    if (more) start(state, share);
    while (more) {
      attend(state, share);
      more = take(next);
      if (more && starts_early(next)) {
        approach(next);
        multiply_first(state, next, [&] { finish(state, share); });
      } else {
        finish(state, share);
        if (more) start(state, next);
      }
      share = next;
    }
    turns.finish(warpgroup);
  }
};

#endif  // sm_90a

}  // namespace cufuse
