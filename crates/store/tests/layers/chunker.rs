//! Cut points are a storage format.

use layerpack_store::chunker::{Params, cut};

use crate::support::{noise, text};

fn lengths(mut data: &[u8], params: &Params) -> Vec<usize> {
    let mut lengths = Vec::new();
    while !data.is_empty() {
        let n = cut(data, params);
        assert!(n > 0);
        lengths.push(n);
        data = &data[n..];
    }
    lengths
}

/// From an independent implementation in another language.
#[test]
fn golden_default() {
    let expected = [
        103970, 94748, 71437, 77465, 125026, 113456, 73644, 83798, 65899, 20458, 66732, 78171,
        79217, 72553, 76951, 38914, 78831, 67825, 51272, 94618, 66950, 72036, 68501, 103186,
        101469, 52873,
    ];
    assert_eq!(lengths(&noise(1, 2_000_000), &Params::default()), expected);
}

/// From an independent implementation in another language.
#[test]
fn golden_small() {
    let params = Params {
        min: 256,
        avg: 1024,
        max: 8192,
        whole: 0,
    };
    let seen = lengths(&noise(2, 100_000), &params);
    assert_eq!(seen.len(), 87);
    assert_eq!(
        seen[..12],
        [
            1462, 1237, 927, 1271, 1382, 1420, 2596, 523, 962, 1100, 1125, 1423
        ]
    );
    assert_eq!(seen[84..], [1025, 1194, 390]);
}

#[test]
fn monotonous_data_is_cut_at_the_maximum() {
    assert_eq!(
        lengths(&vec![0; 600_000], &Params::default()),
        [262_144, 262_144, 75_712]
    );
}

#[test]
fn only_the_first_max_bytes_decide() {
    let params = Params::default();
    let data = text(5, 2_000_000);
    let whole = cut(&data, &params);
    assert_eq!(whole, cut(&data[..params.max], &params));
    assert_eq!(cut(&[], &params), 0);
    for len in [1, params.min - 1, params.min, params.min + 1] {
        assert_eq!(cut(&data[..len], &params), len);
    }
}

/// What content-defined cutting is for: an insertion moves cuts near it only.
#[test]
fn cuts_follow_content() {
    let params = Params::default();
    let data = noise(3, 4_000_000);
    let mut changed = data.clone();
    changed.splice(1_000_000..1_000_000, *b"a few more bytes");
    let ends = |data: &[u8]| {
        let mut at = 0;
        let ends: Vec<usize> = lengths(data, &params)
            .iter()
            .map(|n| {
                at += n;
                data.len() - at
            })
            .collect();
        ends
    };
    let (before, after) = (ends(&data), ends(&changed));
    let shared = before.iter().filter(|e| after.contains(e)).count();
    assert!(
        shared + 6 > before.len() - 14 && shared * 10 > before.len() * 6,
        "{shared} of {}",
        before.len()
    );
}

#[test]
fn parameters_have_one_spelling() {
    let params = Params::default();
    assert_eq!(params.to_string(), "gear64-v1:16384:65536:262144:65536");
    assert_eq!(params.to_string().parse::<Params>().unwrap(), params);
    for bad in [
        "",
        "gear64-v1",
        "gear64-v2:16384:65536:262144:65536",
        "gear64-v1:1:65536:262144:65536",
        "gear64-v1:16384:65537:262144:65536",
        "gear64-v1:16384:65536:262144:65536:1",
        "gear64-v1:16384:65536:2097152:65536",
        "gear64-v1:16384:65536:262144",
        "gear64-v1:65536:16384:262144:65536",
    ] {
        assert!(bad.parse::<Params>().is_err(), "{bad}");
    }
}
