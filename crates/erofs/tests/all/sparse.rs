//! The plan of files with holes.

use layerpack_erofs::{BLOCK_SIZE, BlockIndex, FileLayout, plan_sparse};
use proptest::prelude::*;

#[test]
fn a_file_without_holes_is_one_piece() {
    for size in [1, 4095, 4096, 4097, 1 << 20, (1 << 43) + 1] {
        let plan = plan_sparse(size, &[0..size]);
        assert_eq!(plan.blocks(), size.div_ceil(BLOCK_SIZE), "{size}");
        assert_eq!(plan.address_of(size - 1), Some(size - 1));
        assert_eq!(plan.address_of(size), None);
        if size <= 1 << 43 {
            let start = BlockIndex::new(7).unwrap();
            assert_eq!(plan.layout(start), Some(FileLayout::Contiguous { start }));
        }
    }
}

#[test]
fn nothing_but_holes_takes_no_addresses() {
    for size in [1, 4097, 1 << 40, 1 << 43] {
        let plan = plan_sparse(size, &[]);
        assert_eq!(plan.blocks(), 0);
        let layout = plan.layout(BlockIndex::new(0).unwrap()).unwrap();
        assert!(matches!(layout, FileLayout::Chunked { chunks, .. } if chunks == [None]));
    }
    let empty = plan_sparse(0, &[]);
    assert_eq!(
        empty.layout(BlockIndex::new(0).unwrap()),
        Some(FileLayout::Empty)
    );
}

#[test]
fn index_and_address_space_are_weighed() {
    let plan = plan_sparse(1 << 43, &[5 << 40..(5 << 40) + 1]);
    let chunks = (1_u64 << 43) >> plan.chunk_bits();
    assert!(chunks * 8 <= 256 << 10, "{chunks} chunks");
    assert!(
        plan.blocks() * BLOCK_SIZE <= 1 << 30,
        "{} blocks",
        plan.blocks()
    );
    // However large and scattered, the index stays bounded.
    let data: Vec<_> = (0..1000).map(|n| n << 53..(n << 53) + 1).collect();
    let plan = plan_sparse(i64::MAX.cast_unsigned(), &data);
    assert!(i64::MAX.cast_unsigned() >> plan.chunk_bits() <= 1 << 22);
}

#[test]
fn ranges_may_be_odd() {
    let plan = plan_sparse(10_000, &[9_000..50_000, 0..1, 0..1, 5..5, 20_000..30_000]);
    assert_eq!(
        plan.address_of(9_999).map(|at| at % BLOCK_SIZE),
        Some(9_999 % BLOCK_SIZE)
    );
    assert_eq!(plan.address_of(10_000), None);
}

#[test]
fn addresses_past_the_format_are_refused() {
    let plan = plan_sparse(8192, &[0..8192]);
    assert!(
        plan.layout(BlockIndex::new(u64::from(u32::MAX) - 1).unwrap())
            .is_none()
    );
    assert!(
        plan.layout(BlockIndex::new(u64::from(u32::MAX) - 2).unwrap())
            .is_some()
    );
    assert!(BlockIndex::new(u64::from(u32::MAX)).is_none());
}

proptest! {
    #[test]
    fn plans_hold_the_data(
        size in 1..1_u64 << 30,
        starts in proptest::collection::vec((0..1_u64 << 30, 1..100_000_u64), 0..20),
    ) {
        let data: Vec<_> = starts.iter().map(|(start, len)| *start..*start + *len).collect();
        let plan = plan_sparse(size, &data);
        let start = BlockIndex::new(3).unwrap();
        let layout = plan.layout(start).unwrap();
        let mut highest = None;
        for range in &data {
            for offset in [range.start, range.start + (range.end - range.start) / 2, range.end - 1] {
                if offset >= size {
                    continue;
                }
                let address = plan.address_of(offset).unwrap();
                prop_assert!(address / BLOCK_SIZE < plan.blocks());
                highest = highest.max(Some(address));
                let by_layout = match &layout {
                    FileLayout::Empty => unreachable!(),
                    FileLayout::Contiguous { .. } => start.byte_offset() + offset,
                    FileLayout::Chunked { chunk_bits, chunks } => {
                        chunks[(offset >> chunk_bits) as usize].unwrap().byte_offset()
                            + offset % (1 << chunk_bits)
                    }
                };
                prop_assert_eq!(by_layout, start.byte_offset() + address);
            }
        }
        if highest.is_none() {
            prop_assert_eq!(plan.blocks(), 0);
        }
    }
}
