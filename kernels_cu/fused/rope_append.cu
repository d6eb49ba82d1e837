// Split a row of the QKV projection into heads; q = rope(norm(q)) goes out, k = rope(norm(k)) and v
// go into the cache at the row's position start + i. The norms are optional, over one head or over
// the full projection. kLanes lanes take kHeads heads of a row together, a lane two 16-byte vectors
// of each, so that cosines and sines are loaded once; for the full norm a CTA takes one row and its
// mean. Bounded by memory, at few rows by the launch.
// instantiate: rope_append<bfloat16, Pairing::half_split, QkNorm::head, Rounding::cast_first, 8, 8, 2>
// instantiate: rope_append<bfloat16, Pairing::half_split, QkNorm::none, Rounding::cast_first, 8, 4, 4>
// instantiate: rope_append<bfloat16, Pairing::interleaved, QkNorm::none, Rounding::cast_first, 8, 32, 4>
// instantiate: rope_append<half, Pairing::interleaved, QkNorm::full, Rounding::scale_first, 8, 8, 2>
// instantiate: rope_append<float, Pairing::interleaved, QkNorm::head, Rounding::one_plus, 4, 32, 2>
// instantiate: rope_append<float, Pairing::half_split, QkNorm::full, Rounding::one_plus, 1, 32, 1>
#include "device/rope.cuh"

namespace cufuse {

template <typename T>
struct RopeAppendArgs {
  const T* qkv;        // [batch, q_len, (n_heads + 2 n_kv_heads) head_dim]
  const float* cos;    // [max_pos, n_pairs]; null: nothing is rotated
  const float* sin;    // [max_pos, n_pairs]
  const int* start;    // [batch]; tokens in the cache
  const T* q_weight;   // [head_dim], full: [n_heads head_dim]; null: queries are not normalised
  const T* k_weight;   // [head_dim], full: [n_kv_heads head_dim]; null: keys are not normalised
  T* q;                // [batch, q_len, n_heads, head_dim]
  T* k_cache;          // [batch, n_kv_heads, capacity, head_dim]; at the strides below
  T* v_cache;          // [batch, n_kv_heads, capacity, head_dim]; at the strides below
  i64 k_batch_stride;  // strides count elements
  i64 k_head_stride;
  i64 k_pos_stride;
  i64 v_batch_stride;
  i64 v_head_stride;
  i64 v_pos_stride;
  int rows;  // batch q_len
  int q_len;
  int n_heads;
  int n_kv_heads;
  int head_dim;
  int n_pairs;
  int max_pos;
  int capacity;
  float qk_eps;
};

// How a head is cut into slots of two vectors of kVec values. Where the values of a pair lie in two
// vectors, these make a slot; after them, each vector of the first half of what remains has one of
// the second half beside it, or the last one nothing.
template <Pairing kPairing, int kVec>
struct HeadCut {
  static constexpr bool kPairsApart = kPairing == Pairing::half_split || kVec == 1;
  int head_dim;
  int n_pairs;
  int pair_slots;
  int slots;

  CUFUSE_DEVICE HeadCut(int head_dim, int n_pairs)
      : head_dim(head_dim),
        n_pairs(n_pairs),
        pair_slots(kPairsApart ? static_cast<u32>(n_pairs) / kVec : 0),
        slots((static_cast<u32>(head_dim) / kVec + 1) / 2) {}

  CUFUSE_DEVICE int first(int slot) const {
    return slot < pair_slots ? pair_first<kPairing>(slot * kVec, n_pairs)
                             : (pair_slots + slot) * kVec;
  }

  CUFUSE_DEVICE int second(int slot) const {
    return slot < pair_slots ? pair_second<kPairing>(slot * kVec, n_pairs) : (slots + slot) * kVec;
  }

  CUFUSE_DEVICE bool has_first(int slot) const { return slot < slots; }

  CUFUSE_DEVICE bool has_second(int slot) const { return slot < slots && second(slot) < head_dim; }
};

template <int kCount>
CUFUSE_DEVICE void load_angles(float* angles, const float* from) {
  constexpr int kStep = kCount < 4 ? kCount : 4;
#pragma unroll
  for (int i = 0; i < kCount; i += kStep) {
    const auto some = load_vec<kStep>(from + i);
#pragma unroll
    for (int j = 0; j < kStep; ++j) angles[i + j] = some.v[j];
  }
}

// The angles of a slot, the same for all heads of a row; NaN outside the table.
template <Pairing kPairing, int kVec>
struct SlotAngles {
  using Cut = HeadCut<kPairing, kVec>;
  float cos[kVec], sin[kVec];
  bool turns_first, turns_second;

  CUFUSE_DEVICE SlotAngles(
      const Cut& cut, int slot, const float* row_cos, const float* row_sin, bool in_table) {
    constexpr int kPerVector = Cut::kPairsApart ? kVec : kVec / 2;
    if constexpr (Cut::kPairsApart) {
      turns_first = turns_second = slot < cut.pair_slots;
    } else {
      turns_first = cut.has_first(slot) && cut.first(slot) < 2 * cut.n_pairs;
      turns_second = cut.has_second(slot) && cut.second(slot) < 2 * cut.n_pairs;
    }
#pragma unroll
    for (int j = 0; j < kVec; ++j) cos[j] = sin[j] = __int_as_float(0x7fffffff);
    if (in_table && turns_first) {
      const int t = Cut::kPairsApart ? slot * kVec : cut.first(slot) / 2;
      load_angles<kPerVector>(cos, row_cos + t);
      load_angles<kPerVector>(sin, row_sin + t);
    }
    if (!Cut::kPairsApart && in_table && turns_second) {
      const int t = cut.second(slot) / 2;
      load_angles<kPerVector>(cos + kVec - kPerVector, row_cos + t);
      load_angles<kPerVector>(sin + kVec - kPerVector, row_sin + t);
    }
  }

  CUFUSE_DEVICE void turn(float (&first)[kVec], float (&second)[kVec]) const {
    if constexpr (Cut::kPairsApart) {
      if (!turns_first) return;
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const float2 pair = rotated(first[j], second[j], cos[j], sin[j]);
        first[j] = pair.x;
        second[j] = pair.y;
      }
    } else {
      if (turns_first) turn_neighbours(first, 0);
      if (turns_second) turn_neighbours(second, kVec / 2);
    }
  }

 private:
  CUFUSE_DEVICE void turn_neighbours(float (&values)[kVec], int angle) const {
#pragma unroll
    for (int j = 0; j < kVec / 2; ++j) {
      const float2 pair = rotated(values[2 * j], values[2 * j + 1], cos[angle + j], sin[angle + j]);
      values[2 * j] = pair.x;
      values[2 * j + 1] = pair.y;
    }
  }
};

// kVec values in words: values of 2 bytes would take a register each. One value is held in float32.
template <typename T, int kVec>
struct Held {
  static constexpr bool kPacked = kVec > 1 && sizeof(T) == 2;
  static constexpr int kWords = kPacked ? kVec / 2 : kVec;
  Vec<u32, kWords> words;

  CUFUSE_DEVICE void load(const T* p) {
    if constexpr (kVec == 1) {
      words.v[0] = __float_as_uint(to_float(*p));
    } else {
      words = load_vec<kWords>(reinterpret_cast<const u32*>(p));
    }
  }

  CUFUSE_DEVICE void store(T* p) const {
    if constexpr (kVec == 1) {
      *p = from_float<T>(__uint_as_float(words.v[0]));
    } else {
      store_vec<kWords>(reinterpret_cast<u32*>(p), words);
    }
  }

  CUFUSE_DEVICE void get(float (&values)[kVec]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (kPacked) {
        unpack_pair(values[2 * i], values[2 * i + 1], words.v[i], T{});
      } else {
        values[i] = __uint_as_float(words.v[i]);
      }
    }
  }

  CUFUSE_DEVICE void set(const float (&values)[kVec]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (kPacked) {
        union {
          Vec<T, 2> pair;
          u32 word;
        } u{{from_float<T>(values[2 * i]), from_float<T>(values[2 * i + 1])}};
        words.v[i] = u.word;
      } else {
        words.v[i] = __float_as_uint(values[i]);
      }
    }
  }
};

template <typename T, int kVec>
CUFUSE_DEVICE float squares(const Held<T, kVec>& held) {
  float values[kVec];
  held.get(values);
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kVec; ++j) sum = fmaf(values[j], values[j], sum);
  return sum;
}

// The full norm has a CTA for every row.
template <QkNorm kNorm>
constexpr int kThreads = kNorm == QkNorm::full ? 256 : 128;

// Without a norm and later slots, registers suffice for as many CTAs as keep memory busy.
template <QkNorm kNorm, int kLanes, int kHeads>
constexpr int kCtasPerSm =
    kNorm == QkNorm::none && kLanes < 32 ? (kHeads == 4 ? 5 : 8) : 512 / kThreads<kNorm>;

template <typename T,
          Pairing kPairing,
          QkNorm kNorm,
          Rounding kRounding,
          int kVec,
          int kLanes,
          int kHeads>
__global__ void __launch_bounds__(kThreads<kNorm>, kCtasPerSm<kNorm, kLanes, kHeads>)
    rope_append(const RopeAppendArgs<T> args) {
  constexpr int kGroups = kThreads<kNorm> / kLanes;
  const int all_heads = args.n_heads + 2 * args.n_kv_heads;
  const int row_groups = (all_heads + kHeads - 1) / kHeads;
  const int lane = threadIdx.x % kLanes;

  // A group's row and first head; every row_groups-th head from there is its. A group without work
  // has none, and stays for the shuffles and barriers.
  int row, group;
  if constexpr (kNorm == QkNorm::full) {
    row = blockIdx.x;
    group = blockIdx.y * kGroups + threadIdx.x / kLanes;
    if (group >= row_groups) group = all_heads;
  } else {
    const u32 place = blockIdx.x * kGroups + threadIdx.x / kLanes;
    row = place / static_cast<u32>(row_groups);
    group = place - static_cast<u32>(row) * row_groups;
    if (row >= args.rows) row = 0, group = all_heads;
  }
  const T* x = args.qkv + static_cast<i64>(row) * (all_heads * args.head_dim);
  const HeadCut<kPairing, kVec> cut(args.head_dim, args.n_pairs);

  struct Slot {
    Held<T, kVec> first[kHeads], second[kHeads];
  };
  // What is beyond the head or the row is loaded from inside and not used.
  const auto load = [&](int slot) {
    const T* first = x + cut.first(min(slot, cut.slots - 1));
    const T* second = x + min(cut.second(slot), args.head_dim - kVec);
    Slot values;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const u32 offset = min(group + h * row_groups, all_heads - 1) * args.head_dim;
      values.first[h].load(first + offset);
      values.second[h].load(second + offset);
    }
    return values;
  };
  // Most heads have no more than kLanes slots; of others, the later slots are loaded once a pass.
  Slot kept = load(lane);
  const u32 batch = static_cast<u32>(row) / args.q_len;
  const i64 position = static_cast<i64>(args.start[batch]) + (row - batch * args.q_len);
  const bool in_table = position >= 0 && position < args.max_pos;
  const i64 angles_at = in_table ? position * args.n_pairs : 0;
  const auto angles_of = [&](int slot) {
    return SlotAngles<kPairing, kVec>(cut, slot, args.cos + angles_at, args.sin + angles_at,
                                      in_table);
  };
  const auto kept_angles = angles_of(lane);
  const auto later_slots = [&](auto visit) {
    if constexpr (kLanes == 32) {
      for (int slot = lane + kLanes; slot < cut.slots; slot += kLanes) visit(slot);
    }
  };

  // The scales of the norms. Full: one for all query heads, one for all key heads.
  float scales[kHeads];
  float q_scale = 0.0f, k_scale = 0.0f;
  if constexpr (kNorm == QkNorm::full) {
    __shared__ float partial[kThreads<kNorm> / 32];
    const int q_size = args.n_heads * args.head_dim;
    if (args.q_weight) q_scale = rms_scale<kThreads<kNorm>, kVec>(x, q_size, args.qk_eps, partial);
    if (args.k_weight) {
      k_scale = rms_scale<kThreads<kNorm>, kVec>(x + q_size, args.n_kv_heads * args.head_dim,
                                                 args.qk_eps, partial);
    }
  }
  if constexpr (kNorm == QkNorm::head) {
    const auto add_squares = [&](int slot, const Slot& values) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float first = squares(values.first[h]), second = squares(values.second[h]);
        scales[h] += (cut.has_first(slot) ? first : 0.0f) + (cut.has_second(slot) ? second : 0.0f);
      }
    };
#pragma unroll
    for (int h = 0; h < kHeads; ++h) scales[h] = 0.0f;
    add_squares(lane, kept);
    later_slots([&](int slot) { add_squares(slot, load(slot)); });
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float mean = lanes_sum<kLanes>(scales[h]) / static_cast<float>(args.head_dim);
      scales[h] = rsqrtf(mean + args.qk_eps);
    }
  }

  // Where a head goes; keys and values beyond the cache are dropped.
  const bool fits = position >= 0 && position < args.capacity;
  const u32 place_in_cache = fits ? position : 0;
  T* q_row = args.q + static_cast<i64>(row) * (args.n_heads * args.head_dim);
  T* k_row = args.k_cache + batch * args.k_batch_stride + place_in_cache * args.k_pos_stride;
  T* v_row = args.v_cache + batch * args.v_batch_stride + place_in_cache * args.v_pos_stride;
  const auto target = [&](int head) {
    const bool is_query = head < args.n_heads, is_key = head < args.n_heads + args.n_kv_heads;
    const int before = is_query ? 0 : is_key ? args.n_heads : args.n_heads + args.n_kv_heads;
    const i64 stride = is_query ? args.head_dim : is_key ? args.k_head_stride : args.v_head_stride;
    return (is_query ? q_row : is_key ? k_row : v_row) + static_cast<u32>(head - before) * stride;
  };

  // Norm and rotation of queries and keys in registers, then all stores.
  const auto finish = [&](int slot, Slot& values, const SlotAngles<kPairing, kVec>& angles) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const int head = group + h * row_groups;
      if (head >= args.n_heads + args.n_kv_heads) continue;
      float first[kVec], second[kVec];
      values.first[h].get(first);
      values.second[h].get(second);
      if constexpr (kNorm != QkNorm::none) {
        const bool is_query = head < args.n_heads;
        const T* weight = is_query ? args.q_weight : args.k_weight;
        if (weight) {
          float scale = scales[h];
          if constexpr (kNorm == QkNorm::full) {
            scale = is_query ? q_scale : k_scale;
            weight += (is_query ? head : head - args.n_heads) * args.head_dim;
          }
          Held<T, kVec> first_weights, second_weights;
          first_weights.load(weight + cut.first(min(slot, cut.slots - 1)));
          second_weights.load(weight + min(cut.second(slot), args.head_dim - kVec));
          float weights[kVec];
          first_weights.get(weights);
          normalize<T, kRounding>(first, scale, weights);
          second_weights.get(weights);
          normalize<T, kRounding>(second, scale, weights);
        }
      }
      angles.turn(first, second);
      values.first[h].set(first);
      values.second[h].set(second);
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const int head = group + h * row_groups;
      if (head >= (fits ? all_heads : args.n_heads)) continue;
      T* y = target(head);
      if (cut.has_first(slot)) values.first[h].store(y + cut.first(slot));
      if (cut.has_second(slot)) values.second[h].store(y + cut.second(slot));
    }
  };
  finish(lane, kept, kept_angles);
  later_slots([&](int slot) {
    Slot values = load(slot);
    finish(slot, values, angles_of(slot));
  });
}

}  // namespace cufuse
