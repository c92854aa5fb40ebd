"""The kernel behind `kernels.recompute`, which launches it."""

import triton
import triton.language as tl

from kernels.addressing import cell_offset, element_offset


@triton.jit(
    do_not_specialize=["num_tokens", "first_block", "num_blocks"],
    do_not_specialize_on_alignment=["positions", "slots"],
)
def recompute_kernel(
    hidden,
    norm_weight,
    qkv_weight,
    qkv_bias,
    q_norm_weight,
    k_norm_weight,
    cos,
    sin,
    positions,
    slots,
    q,
    k_pages,
    v_pages,
    num_tokens,
    first_block,
    num_blocks,
    eps,
    hidden_stride,
    k_strides,
    v_strides,
    HIDDEN: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    STEP: tl.constexpr,
):
    """One tile: TOKENS tokens of TILE_HEADS heads of Q, of K or of V. Tensors are as in `recompute`.

    Its columns are (head, half, element), halves padded to HALF, a power of two: so RoPE's pairs come apart by a
    reshape, and every norm of a head stays within the program. Blocks of TILE_HEADS heads are numbered through Q, K and
    V, and the launch computes `num_blocks` of them from `first_block` on: one compiled kernel serves all forms.
    """
    Q_BLOCKS: tl.constexpr = (HEADS + TILE_HEADS - 1) // TILE_HEADS
    KV_BLOCKS: tl.constexpr = (KV_HEADS + TILE_HEADS - 1) // TILE_HEADS
    COLUMNS: tl.constexpr = TILE_HEADS * 2 * HALF

    # Eight tiles of tokens at a time go through all blocks of heads, so that both operands stay in the L2 cache.
    program = tl.program_id(0)
    first_tile = program // (8 * num_blocks) * 8
    tiles = tl.minimum(tl.cdiv(num_tokens, TOKENS) - first_tile, 8)
    program = program % (8 * num_blocks)
    tile = first_tile + program % tiles
    block = first_block + program // tiles

    is_q = block < Q_BLOCKS
    is_v = block >= Q_BLOCKS + KV_BLOCKS
    head = tl.where(is_q, block, tl.where(is_v, block - Q_BLOCKS - KV_BLOCKS, block - Q_BLOCKS)) * TILE_HEADS
    heads = tl.where(is_q, HEADS, KV_HEADS)
    width = tl.where(is_v, V_HEAD_DIM, HEAD_DIM)
    half = (width + 1) // 2
    first_row = tl.where(is_q, 0, tl.where(is_v, (HEADS + KV_HEADS) * HEAD_DIM, HEADS * HEAD_DIM)) + head * width

    column = tl.arange(0, COLUMNS)
    column_head = column // (2 * HALF)
    element = column % HALF + (column // HALF % 2) * half
    row = first_row + column_head * width + element
    row_live = (head + column_head < heads) & (column % HALF < half) & (element < width)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    token_live = token < num_tokens
    step = tl.arange(0, STEP)

    x_pointers = hidden + element_offset(token, hidden_stride)[:, None] + step[None, :]
    w_pointers = qkv_weight + element_offset(row, HIDDEN)[None, :] + step[:, None]

    largest = 1.0
    if hidden.dtype.element_ty == tl.float16:
        # Before they are divided by the row's norm, hidden states times a weight could leave float16's range.
        for k in range(0, HIDDEN, 1024):
            at = k + tl.arange(0, 1024)
            n = tl.load(norm_weight + at, mask=at < HIDDEN, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(n)))
    shrink = 1.0 / largest

    acc = tl.zeros((TOKENS, COLUMNS), tl.float32)
    squares = tl.zeros((TOKENS, STEP // 8), tl.float32)
    for k in range(0, HIDDEN, STEP):
        x_live, w_live, n_live = token_live[:, None], row_live[None, :], None
        if HIDDEN % STEP != 0:
            n_live = step < HIDDEN - k
            x_live, w_live = x_live & n_live[None, :], w_live & n_live[:, None]
        x = tl.load(x_pointers + k, mask=x_live, other=0.0).to(tl.float32)
        w = tl.load(w_pointers + k, mask=w_live, other=0.0)
        n = tl.load(norm_weight + k + step, mask=n_live, other=0.0 if HIDDEN % STEP != 0 else None).to(tl.float32)
        # Summed over neighbours, which lie in one thread, so that the sums stay there and few.
        squares += tl.sum(tl.reshape(x * x, (TOKENS, STEP // 8, 8)), axis=2)
        acc = tl.dot((x * (n * shrink)[None, :]).to(w.dtype), w, acc, input_precision="ieee")

    acc *= largest * tl.rsqrt(tl.sum(squares, axis=1) / HIDDEN + eps)[:, None]
    if qkv_bias is not None:
        acc += tl.load(qkv_bias + row, mask=row_live, other=0.0).to(tl.float32)[None, :]
    pairs = tl.permute(tl.reshape(acc, (TOKENS, TILE_HEADS, 2, HALF)), (0, 1, 3, 2))
    left, right = tl.split(pairs)

    i = tl.arange(0, HALF)
    if q_norm_weight is not None:
        mean = tl.sum(left * left + right * right, axis=2) / HEAD_DIM
        scale = tl.rsqrt(mean + eps)[:, :, None]
        live = (i < half) & (~is_v)
        weights = tl.where(is_q, q_norm_weight, k_norm_weight) + i
        left_weight = tl.load(weights, mask=live, other=1.0).to(tl.float32)[None, None, :]
        right_weight = tl.load(weights + half, mask=live, other=1.0).to(tl.float32)[None, None, :]
        left = tl.where(is_v, left, left * scale * left_weight)
        right = tl.where(is_v, right, right * scale * right_weight)

    position = tl.load(positions + token, mask=token_live, other=0)
    live = token_live[:, None] & (i < half)[None, :] & (~is_v)
    entry = element_offset(position, HEAD_DIM // 2)[:, None] + i[None, :]
    c = tl.load(cos + entry, mask=live, other=1.0)[:, None, :]
    s = tl.load(sin + entry, mask=live, other=0.0)[:, None, :]
    left, right = left * c - right * s, right * c + left * s

    tile_head = head + tl.arange(0, TILE_HEADS)
    live = (token_live[:, None] & (tile_head < heads)[None, :])[:, :, None] & (i < half)[None, None, :]
    right_live = live & (i < width - half)[None, None, :]
    if is_q:
        offset = element_offset(token, HEADS * HEAD_DIM)[:, None] + (tile_head * HEAD_DIM)[None, :]
        pointers = q + offset[:, :, None] + i[None, None, :]
        tl.store(pointers, left.to(q.dtype.element_ty), mask=live)
        tl.store(pointers + half, right.to(q.dtype.element_ty), mask=right_live)
    else:
        slot = tl.load(slots + token, mask=token_live, other=-1)
        written = (slot >= 0)[:, None, None]
        pages = tl.where(is_v, v_pages, k_pages)
        page_stride = tl.where(is_v, v_strides[0], k_strides[0])
        token_stride = tl.where(is_v, v_strides[1], k_strides[1])
        head_stride = tl.where(is_v, v_strides[2], k_strides[2])
        offset = cell_offset(slot, page_stride, token_stride, PAGE_SIZE)
        offset = offset[:, None] + element_offset(tile_head, head_stride)[None, :]
        pointers = pages + offset[:, :, None] + i[None, None, :]
        tl.store(pointers, left.to(pages.dtype.element_ty), mask=live & written)
        tl.store(pointers + half, right.to(pages.dtype.element_ty), mask=right_live & written)
