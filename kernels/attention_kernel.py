"""The kernels behind `kernels.attention`, which launches them: one for both forms, and the merge of a split launch.

A program has BLOCK_Q rows of one part and one KV head. Rows are (token, head of the group) pairs, token-major, so that
all heads of a group share what is read of their KV head, and no group size leaves rows idle. Keys come in tiles of
BLOCK_K. Tiles that nobody in the program sees are not visited, and tiles that all of them see have no mask.

Softmax runs on base-2 logarithms: one exp2 and one fused multiply-add a score, the softmax scale folded into it.
"""

import triton
import triton.language as tl

from kernels.addressing import element_offset

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# The running maximum before the first key. Finite, so that a row without keys needs no case of its own: scores of
# masked keys are -inf, and exp2(-inf - LOWEST) is 0 where exp2(-inf + inf) would be NaN.
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def part_of_tile(query_start, parts, tile, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr):
    """The part that a tile of rows belongs to, and the number of the tile within it.

    Part i begins with tile `query_start[i] * GROUP // BLOCK_Q + i`: this leaves room for every part's incomplete last
    tile, so no table of tiles is needed; some tiles have no rows.
    """
    low = 0
    high = parts
    while high - low > 1:
        middle = (low + high) // 2
        reached = tl.load(query_start + middle) * GROUP // BLOCK_Q + middle <= tile
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    return low, tile - (tl.load(query_start + low) * GROUP // BLOCK_Q + low)


@triton.jit
def columns(rows, inside, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """[n, BLOCK_WIDTH]: what lies behind the pointers `rows`, [n]; 0 in rows that are not inside (None = all are) and
    in columns from WIDTH on."""
    column = tl.arange(0, BLOCK_WIDTH)[None, :]
    pointers = rows[:, None] + column
    if WIDTH == BLOCK_WIDTH and inside is None:
        values = tl.load(pointers)
    elif WIDTH == BLOCK_WIDTH:
        values = tl.load(pointers, mask=inside[:, None], other=0.0)
    elif inside is None:
        values = tl.load(pointers, mask=column < WIDTH, other=0.0)
    else:
        values = tl.load(pointers, mask=inside[:, None] & (column < WIDTH), other=0.0)
    return values


@triton.jit
def page_place(table, strides, head, first, inside, PAGE_SIZE: tl.constexpr, BLOCK_K: tl.constexpr):
    """Where the BLOCK_K keys from `first` on are within pages, as (offset, stride): key i is at offset (int64, scalar
    or [BLOCK_K]) + i * stride. Page ids of keys that are not inside (None = all are) are not looked up: they may be
    behind the table's row, or be no ids at all."""
    index = tl.arange(0, BLOCK_K)
    if PAGE_SIZE % BLOCK_K == 0:  # all in one page, and a tile that is visited has a key inside
        page, slot, stride = tl.load(table + first // PAGE_SIZE), first % PAGE_SIZE, strides[1]
    else:
        if BLOCK_K % PAGE_SIZE == 0:
            number, slot = first // PAGE_SIZE + index // PAGE_SIZE, index % PAGE_SIZE
        else:
            number, slot = (first + index) // PAGE_SIZE, (first + index) % PAGE_SIZE
        page = tl.load(table + number) if inside is None else tl.load(table + number, mask=inside, other=0)
        stride = 0
    start = element_offset(head, strides[2]) + element_offset(page, strides[0])
    return start + element_offset(slot, strides[1]), stride


@triton.jit
def staged_place(slots, strides, head, first, landed, CHUNK: tl.constexpr):
    """The same within staging, if the tile has landed (None = it has); `slots`: the slots of the sequence's chunks."""
    slot = tl.load(slots + first // CHUNK) if landed is None else tl.load(slots + first // CHUNK, mask=landed, other=0)
    start = element_offset(slot, strides[0]) + element_offset(head, strides[1])
    return start + element_offset(first % CHUNK, strides[2]), strides[2]


@triton.jit
def rows_at(start, place, BLOCK_K: tl.constexpr):
    """[BLOCK_K]: pointers to the keys at a place behind `start`."""
    return start + place[0] + element_offset(tl.arange(0, BLOCK_K), place[1])


@triton.jit
def decoded(values, dtype: tl.constexpr):
    """Staged numbers in `dtype`, exactly; their scales are the business of `score` and `accumulate`. uint8 holds the
    bits of e4m3, for GPUs without that type: shifted into a float16 they are off by its larger bias, 2**8."""
    if values.dtype == tl.uint8:
        bits = values.to(tl.uint16)
        values = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return values.to(dtype)


@triton.jit
def score(q, k, k_scale, head, query, key, scale, parameters, SCORE: tl.constexpr):
    """[BLOCK_Q, BLOCK_K] float32: q k^T; after a score hook in its natural units, else still without `scale`."""
    scores = tl.dot(q, k.T, input_precision="ieee")
    if k_scale is not None:
        scores *= k_scale[None, :]
    if SCORE is not None:
        scores = SCORE(scores * scale, head[:, None], query[:, None], key[None, :], parameters)
    return scores


@triton.jit
def accumulate(scores, v, v_scale, factor, peak, total, acc):
    """A step of the online softmax (Milakov and Gimelshein, 2018); scores * factor are base-2 logarithms."""
    new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
    weights = tl.exp2(scores * factor - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    total = total * shrink + tl.sum(weights, 1)
    if v_scale is not None:
        if v.dtype == tl.float16:  # which has no room below for a small weight times a small scale
            v = (v * v_scale[:, None]).to(v.dtype)
        else:
            weights *= v_scale[None, :]
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return new_peak, total, acc


@triton.jit(do_not_specialize=["num_tokens", "parts", "splits", "block_table_stride", "staged_table_stride"])
def attention_kernel(
    q,
    k_pages,
    v_pages,
    k_descriptor,
    v_descriptor,
    k_staged,
    v_staged,
    k_scales,
    v_scales,
    out,
    lse,
    query_start,
    context,
    block_table,
    staged_table,
    staged_start,
    staged_stop,
    scale,
    num_tokens,
    parts,
    splits,
    q_strides,
    k_strides,
    v_strides,
    k_staged_strides,
    v_staged_strides,
    k_scales_strides,
    v_scales_strides,
    block_table_stride,
    staged_table_stride,
    score_parameters,
    mask_parameters,
    bounds_parameters,
    sink_parameters,
    SCORE: tl.constexpr,
    MASK: tl.constexpr,
    BOUNDS: tl.constexpr,
    SINK: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    V_BLOCK_WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EDGE_STAGES: tl.constexpr,
    STAGED_STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Grid: (KV heads, tiles of rows, splits). Tensors are as in `attention`, but out and lse, which are contiguous,
    have a dimension of splits before the others. lse may be None, and is in base 2 with SPLIT. k_descriptor and
    v_descriptor describe k_pages and v_pages, or are None: then full tiles, too, are loaded through pointers. CHUNK:
    tokens of a chunk in staging, 0 = nothing is there.
    """
    head = tl.program_id(0)
    # The last rows of a part see most keys: they start first.
    tile_of_rows = tl.num_programs(1) - 1 - tl.program_id(1)
    part, number = part_of_tile(query_start, parts, tile_of_rows, GROUP, BLOCK_Q)
    first_token = tl.load(query_start + part)
    rows = (tl.load(query_start + part + 1) - first_token) * GROUP
    if number * BLOCK_Q >= rows:
        return
    row = number * BLOCK_Q + tl.arange(0, BLOCK_Q)
    real = row < rows
    token = first_token + row // GROUP
    q_head = head * GROUP + row % GROUP
    start = tl.load(context + part)
    query = start + row // GROUP
    first_query = start + number * BLOCK_Q // GROUP
    last_query = start + (tl.minimum((number + 1) * BLOCK_Q, rows) - 1) // GROUP

    # Keys [begin, end) are seen by some row, [full_begin, full_end) by every row; causality holds for every variant.
    begin, full_begin, full_end, end = 0, 0, first_query + 1, last_query + 1
    if BOUNDS is not None:
        begin, full_begin, full_end, end = BOUNDS(first_query, last_query, bounds_parameters)
        begin = tl.maximum(begin, 0)
        full_end = tl.minimum(full_end, first_query + 1)
        end = tl.minimum(end, last_query + 1)
    elif MASK is not None:
        full_end = 0
    low = begin // BLOCK_K
    high = tl.where(begin < end, tl.cdiv(end, BLOCK_K), low)  # without keys not even the tile that has `begin`
    if SPLIT:
        share = tl.cdiv(high - low, splits)
        low = tl.minimum(low + tl.program_id(2) * share, high)
        high = tl.minimum(low + share, high)
    # Tiles [low, high) are this program's; [full_low, full_high) of them need no mask, and [staged_low, staged_high) of
    # those are in staging.
    full_low = tl.minimum(tl.maximum(tl.cdiv(full_begin, BLOCK_K), low), high)
    full_high = tl.maximum(tl.minimum(full_end // BLOCK_K, high), full_low)
    staged_low, staged_high = full_high, full_high
    if CHUNK:
        landed_low = tl.load(staged_start + part) // BLOCK_K
        landed_high = tl.load(staged_stop + part) // BLOCK_K
        staged_low = tl.minimum(tl.maximum(landed_low, full_low), full_high)
        staged_high = tl.maximum(tl.minimum(landed_high, full_high), staged_low)
        slots = staged_table + element_offset(part, staged_table_stride)

    table = block_table + element_offset(part, block_table_stride)
    q_rows = q + element_offset(token, q_strides[0]) + element_offset(q_head, q_strides[1])
    q_tile = columns(q_rows, real, WIDTH, BLOCK_WIDTH)
    factor = LOG2_E if SCORE is not None else scale * LOG2_E
    peak = tl.full([BLOCK_Q], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, V_BLOCK_WIDTH], tl.float32)
    if SINK is not None:
        sink = SINK(q_head, sink_parameters).to(tl.float32) * LOG2_E
        sink = tl.where(tl.program_id(2) == 0, sink, float("-inf"))  # the merge adds splits up, so one of them has it
        peak = tl.maximum(peak, sink)
        total = tl.exp2(sink - peak)

    for index in tl.range(0, full_high - full_low - (staged_high - staged_low)):
        tile = full_low + index
        if CHUNK:
            tile += tl.where(tile >= staged_low, staged_high - staged_low, 0)
        first = tile * BLOCK_K
        if k_descriptor is not None:
            page = tl.load(table + first // PAGE_SIZE)
            k = k_descriptor.load([page, first % PAGE_SIZE, head, 0]).reshape(BLOCK_K, BLOCK_WIDTH)
            v = v_descriptor.load([page, first % PAGE_SIZE, head, 0]).reshape(BLOCK_K, V_BLOCK_WIDTH)
        else:
            k_place = page_place(table, k_strides, head, first, None, PAGE_SIZE, BLOCK_K)
            v_place = page_place(table, v_strides, head, first, None, PAGE_SIZE, BLOCK_K)
            k = columns(rows_at(k_pages, k_place, BLOCK_K), None, WIDTH, BLOCK_WIDTH)
            v = columns(rows_at(v_pages, v_place, BLOCK_K), None, V_WIDTH, V_BLOCK_WIDTH)
        key = first + tl.arange(0, BLOCK_K)
        scores = score(q_tile, k, None, q_head, query, key, scale, score_parameters, SCORE)
        peak, total, acc = accumulate(scores, v, None, factor, peak, total, acc)

    if CHUNK:
        for tile in tl.range(staged_low, staged_high, num_stages=STAGED_STAGES):
            first = tile * BLOCK_K
            k_place = staged_place(slots, k_staged_strides, head, first, None, CHUNK)
            v_place = staged_place(slots, v_staged_strides, head, first, None, CHUNK)
            k = decoded(columns(rows_at(k_staged, k_place, BLOCK_K), None, WIDTH, BLOCK_WIDTH), q.dtype.element_ty)
            v = decoded(columns(rows_at(v_staged, v_place, BLOCK_K), None, V_WIDTH, V_BLOCK_WIDTH), q.dtype.element_ty)
            k_scale, v_scale = None, None
            if k_scales is not None:
                k_scale_place = staged_place(slots, k_scales_strides, head, first, None, CHUNK)
                v_scale_place = staged_place(slots, v_scales_strides, head, first, None, CHUNK)
                k_scale = tl.load(rows_at(k_scales, k_scale_place, BLOCK_K))
                v_scale = tl.load(rows_at(v_scales, v_scale_place, BLOCK_K))
            key = first + tl.arange(0, BLOCK_K)
            scores = score(q_tile, k, k_scale, q_head, query, key, scale, score_parameters, SCORE)
            peak, total, acc = accumulate(scores, v, v_scale, factor, peak, total, acc)

    for index in tl.range(0, high - low - (full_high - full_low), num_stages=EDGE_STAGES):
        tile = low + index
        tile += tl.where(tile >= full_low, full_high - full_low, 0)
        first = tile * BLOCK_K
        key = first + tl.arange(0, BLOCK_K)
        inside = (key >= begin) & (key < end)
        k_place = page_place(table, k_strides, head, first, inside, PAGE_SIZE, BLOCK_K)
        v_place = page_place(table, v_strides, head, first, inside, PAGE_SIZE, BLOCK_K)
        k_scale, v_scale = None, None
        # A key that nobody sees may never have been filled, and 0 * NaN is NaN: outside it reads as 0.
        if CHUNK:
            landed = (tile >= landed_low) & (tile < landed_high)
            k_landed = staged_place(slots, k_staged_strides, head, first, landed, CHUNK)
            v_landed = staged_place(slots, v_staged_strides, head, first, landed, CHUNK)
            if k_scales is None:
                k_start = tl.where(landed, k_staged + k_landed[0], k_pages + k_place[0])
                v_start = tl.where(landed, v_staged + v_landed[0], v_pages + v_place[0])
                k_place = (0, tl.where(landed, k_landed[1], k_place[1]))
                v_place = (0, tl.where(landed, v_landed[1], v_place[1]))
                k = columns(rows_at(k_start, k_place, BLOCK_K), None, WIDTH, BLOCK_WIDTH)
                v = columns(rows_at(v_start, v_place, BLOCK_K), inside, V_WIDTH, V_BLOCK_WIDTH)
            else:
                if landed:
                    k_rows, v_rows = rows_at(k_staged, k_landed, BLOCK_K), rows_at(v_staged, v_landed, BLOCK_K)
                    k = decoded(columns(k_rows, None, WIDTH, BLOCK_WIDTH), q.dtype.element_ty)
                    v = decoded(columns(v_rows, None, V_WIDTH, V_BLOCK_WIDTH), q.dtype.element_ty)
                else:
                    k = columns(rows_at(k_pages, k_place, BLOCK_K), None, WIDTH, BLOCK_WIDTH)
                    v = columns(rows_at(v_pages, v_place, BLOCK_K), inside, V_WIDTH, V_BLOCK_WIDTH)
                k_scale_place = staged_place(slots, k_scales_strides, head, first, landed, CHUNK)
                v_scale_place = staged_place(slots, v_scales_strides, head, first, landed, CHUNK)
                k_scale = tl.load(rows_at(k_scales, k_scale_place, BLOCK_K), mask=landed, other=1.0)
                v_scale = tl.load(rows_at(v_scales, v_scale_place, BLOCK_K), mask=landed, other=1.0)
        else:
            k = columns(rows_at(k_pages, k_place, BLOCK_K), None, WIDTH, BLOCK_WIDTH)
            v = columns(rows_at(v_pages, v_place, BLOCK_K), inside, V_WIDTH, V_BLOCK_WIDTH)
        scores = score(q_tile, k, k_scale, q_head, query, key, scale, score_parameters, SCORE)
        visible = key[None, :] <= query[:, None]
        if MASK is not None:
            visible &= MASK(q_head[:, None], query[:, None], key[None, :], mask_parameters)
        scores = tl.where(visible, scores, float("-inf"))
        peak, total, acc = accumulate(scores, v, v_scale, factor, peak, total, acc)

    # The rows anew, in int64: the compiler would keep those from above in registers through the loops.
    row = element_offset(number, BLOCK_Q) + tl.arange(0, BLOCK_Q)
    real = row < rows
    token = first_token + row // GROUP
    q_head = head * GROUP + row % GROUP
    filled = total > 0
    total = tl.where(filled, total, 1.0)
    column = tl.arange(0, V_BLOCK_WIDTH)[None, :]
    values = (acc / total[:, None]).to(out.dtype.element_ty)
    place = element_offset(tl.program_id(2), num_tokens) + token
    place = place * (tl.num_programs(0) * GROUP) + q_head
    tl.store(out + (place * V_WIDTH)[:, None] + column, values, mask=real[:, None] & (column < V_WIDTH))
    if lse is not None:
        logarithm = tl.where(filled, peak + tl.log2(total), float("-inf"))
        if not SPLIT:
            logarithm *= LN_2
        tl.store(lse + place, logarithm, mask=real)


@triton.jit(do_not_specialize=["rows", "splits"])
def merge_kernel(
    partial,
    partial_lse,
    out,
    lse,
    rows,
    splits,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Grid: (tiles of rows,). partial: [splits, rows, WIDTH] float32; partial_lse: [splits, rows] float32, base 2; out:
    [rows, WIDTH]; lse: [rows] float32, natural, or None. All contiguous. A row is a token and head."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    real = row < rows
    column = tl.arange(0, BLOCK_WIDTH)[None, :]
    elements = element_offset(row, WIDTH)[:, None] + column
    peak = tl.full([BLOCK_ROWS], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], tl.float32)
    for split in tl.range(0, splits):
        first = element_offset(split, rows)
        part = tl.load(partial_lse + first + row, mask=real, other=float("-inf"))
        values = tl.load(partial + first * WIDTH + elements, mask=real[:, None] & (column < WIDTH), other=0.0)
        new_peak = tl.maximum(peak, part)
        weight = tl.exp2(part - new_peak)
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + values * weight[:, None]
        peak = new_peak
    filled = total > 0
    total = tl.where(filled, total, 1.0)
    values = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + elements, values, mask=real[:, None] & (column < WIDTH))
    if lse is not None:
        logarithm = tl.where(filled, (peak + tl.log2(total)) * LN_2, float("-inf"))
        tl.store(lse + row, logarithm, mask=real)
