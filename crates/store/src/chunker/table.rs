//! The gear table of `gear64-v1`: the first 256 outputs of SplitMix64 from the seed `SEED`.

/// ASCII "layerpac" as a big-endian number.
const SEED: u64 = 0x6c61_7965_7270_6163;

/// Frozen: a golden test holds its digest.
pub(crate) static GEAR: [u64; 256] = generate();

#[expect(
    clippy::indexing_slicing,
    reason = "evaluated by the compiler, which checks the bounds"
)]
const fn generate() -> [u64; 256] {
    let mut table = [0; 256];
    let mut state = SEED;
    let mut i = 0;
    while i < 256 {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        table[i] = z ^ (z >> 31);
        i += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    #[test]
    fn table_is_frozen() {
        let bytes: Vec<u8> = super::GEAR.iter().flat_map(|g| g.to_le_bytes()).collect();
        assert_eq!(super::GEAR[0], 0);
        assert_eq!(crate::Digest::of(&bytes).hex(), "");
    }
}
