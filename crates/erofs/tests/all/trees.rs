//! Trees: random ones from proptest, and one with every size at its limit.

use layerpack_erofs::{Metadata, NodeId, NodeKind, Rdev, Timestamp};
use layerpack_fixtures::trees::{acl_xattr, capability_xattr};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::common::{Sample, meta};

/// A step of building a random tree. Numbers choose among what exists.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    Dir {
        parent: usize,
        name: Vec<u8>,
        metadata: Metadata,
    },
    File {
        parent: usize,
        name: Vec<u8>,
        metadata: Metadata,
        size: usize,
    },
    Sparse {
        parent: usize,
        name: Vec<u8>,
        metadata: Metadata,
        size: u64,
        at: Vec<u64>,
    },
    Other {
        parent: usize,
        name: Vec<u8>,
        metadata: Metadata,
        kind: NodeKind,
    },
    Link {
        parent: usize,
        name: Vec<u8>,
        target: usize,
    },
    Remove {
        victim: usize,
    },
}

/// Reproducible bytes of a file.
pub(crate) fn bytes(seed: usize, len: usize) -> Vec<u8> {
    (0..len)
        .map(|index| ((index * 31 + index / 251 + seed * 7) % 255 + 1) as u8)
        .collect()
}

fn name() -> impl Strategy<Value = Vec<u8>> {
    let byte = prop_oneof![
        4 => prop_oneof![Just(b'a'), Just(b'b'), Just(b'.'), Just(b'-'), Just(b' '), Just(b'+')],
        1 => 1..=255_u8,
    ];
    let len = prop_oneof![8 => 1..5_usize, 2 => 5..60_usize, 1 => 200..=255_usize];
    len.prop_flat_map(move |len| vec(byte.clone(), len))
        .prop_filter_map("a name", |mut name| {
            name.iter_mut()
                .filter(|byte| **byte == b'/')
                .for_each(|byte| *byte = b'_');
            (name != b"." && name != b"..").then_some(name)
        })
}

fn xattr() -> impl Strategy<Value = (Vec<u8>, Vec<u8>)> {
    let name = prop_oneof![
        "user\\.[a-c]{1,3}",
        "trusted\\.[a-c]{1,3}",
        "trusted\\.overlay\\.(opaque|x)",
        "security\\.[a-c]{1,3}",
        "user\\.[d-z]{200,250}",
    ];
    let value = prop_oneof![
        4 => Just(b"y".to_vec()),
        2 => Just(vec![7; 100]),
        2 => vec(any::<u8>(), 0..40),
        1 => (0..5000_usize).prop_map(|len| bytes(len, len)),
    ];
    (name.prop_map(String::into_bytes), value)
}

pub(crate) fn metadata() -> impl Strategy<Value = Metadata> {
    let id = prop_oneof![
        4 => Just(0), 2 => Just(1000), 1 => 65_534..65_538_u32, 1 => Just(u32::MAX - 1), 1 => any::<u32>(),
    ];
    let sec = prop_oneof![
        6 => Just(1_700_000_000_i64), 1 => Just(-1), 1 => Just(0), 1 => Just(1 << 33), 2 => -(1_i64 << 40)..1 << 40,
    ];
    let nsec = prop_oneof![4 => Just(0), 1 => Just(999_999_999), 1 => 0..1_000_000_000_u32];
    let xattrs = prop_oneof![
        3 => Just(Default::default()),
        1 => vec(xattr(), 0..5).prop_map(|list| list.into_iter().collect()),
    ];
    (0..=0o7777_u16, id.clone(), id, sec, nsec, xattrs).prop_map(
        |(mode, uid, gid, sec, nsec, xattrs)| Metadata {
            mode,
            // The kernel shows the last id as "none".
            uid: uid.min(u32::MAX - 1),
            gid: gid.min(u32::MAX - 1),
            mtime: Timestamp { sec, nsec },
            xattrs,
        },
    )
}

fn other() -> impl Strategy<Value = NodeKind> {
    let rdev = prop_oneof![
        Just(Rdev { major: 0, minor: 0 }),
        Just(Rdev {
            major: 4095,
            minor: (1 << 20) - 1
        }),
        (0..4096_u32, 0..1_u32 << 20).prop_map(|(major, minor)| Rdev { major, minor }),
    ];
    let target =
        prop_oneof![6 => 1..80_usize, 1 => 3900..=4095_usize].prop_map(|len| bytes(len, len));
    prop_oneof![
        3 => target.prop_map(NodeKind::Symlink),
        1 => rdev.clone().prop_map(NodeKind::CharDevice),
        1 => rdev.prop_map(NodeKind::BlockDevice),
        1 => Just(NodeKind::Fifo),
        1 => Just(NodeKind::Socket),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let parent = prop_oneof![3 => Just(0_usize), 2 => any::<usize>()];
    let size = prop_oneof![1 => Just(0_usize), 3 => 1..200_usize, 2 => 4090..4100_usize, 1 => 1..40_000_usize];
    let sparse = (1..1_u64 << 22).prop_flat_map(|size| (Just(size), vec(0..size, 0..5)));
    prop_oneof![
        3 => (parent.clone(), name(), metadata())
            .prop_map(|(parent, name, metadata)| Step::Dir { parent, name, metadata }),
        5 => (parent.clone(), name(), metadata(), size)
            .prop_map(|(parent, name, metadata, size)| Step::File { parent, name, metadata, size }),
        1 => (parent.clone(), name(), metadata(), sparse).prop_map(
            |(parent, name, metadata, (size, at))| Step::Sparse { parent, name, metadata, size, at }
        ),
        2 => (parent.clone(), name(), metadata(), other())
            .prop_map(|(parent, name, metadata, kind)| Step::Other { parent, name, metadata, kind }),
        2 => (parent, name(), any::<usize>())
            .prop_map(|(parent, name, target)| Step::Link { parent, name, target }),
        1 => any::<usize>().prop_map(|victim| Step::Remove { victim }),
    ]
}

pub(crate) fn steps() -> impl Strategy<Value = (Metadata, Vec<Step>)> {
    (
        metadata(),
        prop_oneof![4 => vec(step(), 0..60), 1 => vec(step(), 100..400)],
    )
}

/// Builds the tree of some steps. Steps that the tree refuses (a name that is taken) are left
/// out.
pub(crate) fn build(root: &Metadata, steps: &[Step]) -> Sample {
    let mut sample = Sample::new(root.clone());
    let mut dirs = vec![NodeId::ROOT];
    let mut leaves = Vec::new();
    let mut names: Vec<(NodeId, Vec<u8>)> = Vec::new();
    for (seed, step) in steps.iter().enumerate() {
        // Directories that were removed refuse entries.
        let pick = |list: &[NodeId], number: usize| list[number % list.len()];
        let added = match step.clone() {
            Step::Dir {
                parent,
                name,
                metadata,
            } => {
                let parent = pick(&dirs, parent);
                let made = sample
                    .tree
                    .insert(parent, &name, metadata, NodeKind::Directory);
                made.ok().map(|id| dirs.push(id)).map(|()| (parent, name))
            }
            Step::File {
                parent,
                name,
                metadata,
                size,
            } => {
                let parent = pick(&dirs, parent);
                let data = sample.store(&bytes(seed, size));
                let made = sample
                    .tree
                    .insert(parent, &name, metadata, NodeKind::File(data));
                made.ok().map(|id| leaves.push(id)).map(|()| (parent, name))
            }
            Step::Sparse {
                parent,
                name,
                metadata,
                size,
                at,
            } => {
                let parent = pick(&dirs, parent);
                let pieces: Vec<_> = at
                    .into_iter()
                    .map(|at| (at, bytes(seed, (size - at).min(5000) as usize)))
                    .collect();
                let data = sample.store_sparse(size, &pieces);
                let made = sample
                    .tree
                    .insert(parent, &name, metadata, NodeKind::File(data));
                made.ok().map(|id| leaves.push(id)).map(|()| (parent, name))
            }
            Step::Other {
                parent,
                name,
                mut metadata,
                kind,
            } => {
                let parent = pick(&dirs, parent);
                // Linux shows these of nothing but files and directories.
                metadata
                    .xattrs
                    .retain(|name, _| !name.starts_with(b"user."));
                let made = sample.tree.insert(parent, &name, metadata, kind);
                made.ok().map(|id| leaves.push(id)).map(|()| (parent, name))
            }
            Step::Link {
                parent,
                name,
                target,
            } => {
                let parent = pick(&dirs, parent);
                let made = (!leaves.is_empty())
                    .then(|| sample.tree.link(parent, &name, pick(&leaves, target)).ok());
                made.flatten().map(|()| (parent, name))
            }
            Step::Remove { victim } => {
                if !names.is_empty() {
                    let (parent, name) = names.swap_remove(victim % names.len());
                    // May be gone already with a directory above it.
                    let _ = sample.tree.remove(parent, &name);
                }
                None
            }
        };
        names.extend(added);
    }
    sample
}

/// A tree with every size at and around its limits. `huge`: with files of terabytes and
/// directories of 100,000 entries.
pub(crate) fn limits(huge: bool) -> Sample {
    let root = Metadata {
        mtime: Timestamp { sec: 1, nsec: 2 },
        ..meta(0o755)
    };
    let mut sample = Sample::new(root);
    let top = NodeId::ROOT;
    sizes(&mut sample, huge);
    names(&mut sample);
    full_blocks(&mut sample);
    xattrs(&mut sample);
    numbers(&mut sample);

    let links = sample.dir(top, b"links", meta(0o755));
    let kinds = [
        NodeKind::File(sample.store(b"linked")),
        NodeKind::Symlink(b"linked".to_vec()),
        NodeKind::Fifo,
        NodeKind::Socket,
        NodeKind::CharDevice(Rdev { major: 5, minor: 1 }),
        NodeKind::BlockDevice(Rdev {
            major: 8,
            minor: 300,
        }),
    ];
    for (number, kind) in kinds.into_iter().enumerate() {
        let id = sample.node(links, format!("{number}-first").as_bytes(), kind);
        sample
            .tree
            .link(links, format!("{number}-second").as_bytes(), id)
            .unwrap();
        sample
            .tree
            .link(top, format!("link-{number}").as_bytes(), id)
            .unwrap();
    }
    if huge {
        for count in [65_534_u32, 65_535, 65_536] {
            let dir = sample.dir(top, format!("nlink-{count}").as_bytes(), meta(0o755));
            let id = sample.file(dir, b"0", b"many");
            for number in 1..count {
                sample
                    .tree
                    .link(dir, number.to_string().as_bytes(), id)
                    .unwrap();
            }
        }
        let dir = sample.dir(top, b"many", meta(0o755));
        for number in 0..100_000 {
            sample.node(dir, format!("entry-{number:x}").as_bytes(), NodeKind::Fifo);
        }
        let dir = sample.dir(top, b"subdirectories", meta(0o755));
        for number in 0..65_600 {
            sample.dir(dir, format!("{number}").as_bytes(), meta(0o700));
        }
    }
    sample
}

fn sizes(sample: &mut Sample, huge: bool) {
    let dir = sample.dir(NodeId::ROOT, b"sizes", meta(0o755));
    for size in [0, 1, 4095, 4096, 4097, 8191, 8192, 1 << 20, (1 << 20) + 1] {
        sample.file(dir, size.to_string().as_bytes(), &bytes(size, size));
    }
    for len in [1, 59, 60, 4000, 4031, 4032, 4033, 4063, 4064, 4065, 4095] {
        let target = NodeKind::Symlink(bytes(len, len));
        sample.node(dir, format!("symlink-{len}").as_bytes(), target);
    }
    let mut sparse: Vec<(&str, u64, Vec<u64>)> = vec![
        ("hole-only", 10_000, vec![]),
        ("hole-first", 1 << 20, vec![(1 << 20) - 1]),
        ("hole-last", 1 << 20, vec![0]),
        ("hole-middle", 300_000, vec![0, 299_999]),
        ("4g-minus-1", (1 << 32) - 1, vec![0, (1 << 32) - 2]),
        ("4g", 1 << 32, vec![0, (1 << 32) - 1]),
        ("4g-plus-1", (1 << 32) + 1, vec![0, 1 << 32]),
    ];
    if huge {
        sparse.push(("8t", 1 << 43, vec![0, 1 << 42, (1 << 43) - 1]));
        sparse.push(("8t-plus-1", (1 << 43) + 1, vec![0, 1 << 43]));
    }
    for (name, size, at) in sparse {
        let pieces: Vec<_> = at.into_iter().map(|at| (at, vec![b'#'])).collect();
        let data = sample.store_sparse(size, &pieces);
        sample.node(dir, name.as_bytes(), NodeKind::File(data));
    }
    sample.dir(dir, b"empty", meta(0o755));
}

fn names(sample: &mut Sample) {
    let dir = sample.dir(NodeId::ROOT, b"names", meta(0o755));
    for name in [
        b"-".as_slice(),
        b"--",
        b" ",
        b"+",
        b",",
        b"!",
        b".-",
        b"...",
        b". ",
        b"..a",
        b".a",
        b"..-",
        b"\x01",
        b"\xff",
        b"\xc3\x28",
        b"\n",
        b"0",
        b"\"",
        b"\\",
        b"a\tb",
    ] {
        sample.file(dir, name, name);
    }
    let long = sample.dir(NodeId::ROOT, &[b'n'; 255], meta(0o755));
    for byte in 1..=255_u8 {
        if byte != b'/' {
            sample.node(long, &[byte; 255], NodeKind::Fifo);
        }
    }
    let mut deep = sample.dir(NodeId::ROOT, b"deep", meta(0o755));
    for _ in 0..40 {
        deep = sample.dir(deep, &[b'd'; 255], meta(0o755));
    }
    sample.file(deep, b"bottom", b"10 KiB below");
}

/// Directories whose blocks are exactly full, or one byte short or over.
fn full_blocks(sample: &mut Sample) {
    // "." and ".." take 12 + 1 + 12 + 2; an entry with a name of n bytes takes 12 + n.
    for (blocks, slack) in [(1, -1_i64), (1, 0), (1, 1), (2, -1), (2, 0), (2, 1), (3, 0)] {
        let name = format!("full-{blocks}{slack:+}");
        let dir = sample.dir(NodeId::ROOT, name.as_bytes(), meta(0o755));
        let mut left = 4096 * blocks - 27 + slack;
        let mut number = 0;
        while left > 0 {
            let len = if left >= 128 { 52 } else { left - 12 };
            let name = format!("{number:0width$}", width = len as usize);
            sample.node(dir, name.as_bytes(), NodeKind::Socket);
            left -= 12 + len;
            number += 1;
        }
    }
}

fn xattrs(sample: &mut Sample) {
    let dir = sample.dir(NodeId::ROOT, b"xattrs", meta(0o755));
    let mut add = |name: &[u8], list: Vec<(Vec<u8>, Vec<u8>)>| {
        let id = sample.file(dir, name, name);
        sample.tree.node_mut(id).metadata.xattrs = list.into_iter().collect();
        id
    };
    let text = |text: &str| text.as_bytes().to_vec();
    add(b"value-65535", vec![(text("user.v"), vec![b'v'; 65_535])]);
    // Twice, so that it is shared.
    add(
        b"shared-65535-a",
        vec![(text("user.s"), vec![b's'; 65_535])],
    );
    add(
        b"shared-65535-b",
        vec![(text("user.s"), vec![b's'; 65_535])],
    );
    add(b"empty-value", vec![(text("user.e"), vec![])]);
    let long_name = format!("user.{}", "n".repeat(250));
    add(
        b"name-255",
        vec![(long_name.clone().into_bytes(), text("x"))],
    );
    // More shared ones than one inode can point to.
    for count in [254, 255, 256, 300] {
        for twin in ["a", "b"] {
            let list = (0..count).map(|n| (format!("user.{n:03}").into_bytes(), vec![b'x'; 20]));
            add(format!("shared-{count}-{twin}").as_bytes(), list.collect());
        }
    }
    // The longest body there can be: 262,148 bytes, of which the header takes 12.
    let last = 262_148 - 12 - 3 * (65_535_usize + 4 + 1).next_multiple_of(4) - 5;
    let big = [
        ("user.0", 65_535),
        ("user.1", 65_535),
        ("user.2", 65_535),
        ("user.3", last),
    ];
    add(
        b"longest-body",
        big.iter()
            .map(|(name, len)| (text(name), vec![b'b'; *len]))
            .collect(),
    );
    let mut all = vec![
        (
            text("security.capability"),
            capability_xattr(0x2400, 0, true),
        ),
        (text("trusted.overlay.opaque"), text("y")),
        (text("security.ima"), vec![0, 1, 2, 0xff]),
        (text("user.null"), vec![0; 5]),
    ];
    let acl = acl_xattr(7, &[(1000, 5)], 5, &[(70_000, 4)], 0);
    all.push((text("system.posix_acl_access"), acl.clone()));
    let id = add(b"kinds", all);
    sample.tree.node_mut(id).metadata.mode = 0o750;
    let id = sample.dir(dir, b"default-acl", meta(0o755));
    sample
        .tree
        .node_mut(id)
        .metadata
        .xattrs
        .insert(text("system.posix_acl_default"), acl);
    for (name, kind) in [
        ("symlink", NodeKind::Symlink(text("target"))),
        ("fifo", NodeKind::Fifo),
        ("device", NodeKind::CharDevice(Rdev { major: 1, minor: 3 })),
    ] {
        let id = sample.node(dir, name.as_bytes(), kind);
        sample
            .tree
            .node_mut(id)
            .metadata
            .xattrs
            .insert(text("trusted.t"), text("t"));
    }
}

/// Ids, times, modes and device numbers.
fn numbers(sample: &mut Sample) {
    let dir = sample.dir(NodeId::ROOT, b"numbers", meta(0o755));
    for id in [0, 1, 65_534, 65_535, 65_536, 1 << 21, 1 << 31, u32::MAX - 1] {
        for (name, uid, gid) in [("u", id, 0), ("g", 0, id), ("b", id, id)] {
            let node = sample.node(dir, format!("{name}{id}").as_bytes(), NodeKind::Fifo);
            let metadata = &mut sample.tree.node_mut(node).metadata;
            (metadata.uid, metadata.gid) = (uid, gid);
        }
    }
    for sec in [
        i64::MIN,
        -(1 << 40),
        -1,
        0,
        1,
        (1 << 31) - 1,
        1 << 31,
        1 << 32,
        1 << 34,
        i64::MAX,
    ] {
        for nsec in [0, 1, 999_999_999] {
            let node = sample.node(dir, format!("t{sec}.{nsec}").as_bytes(), NodeKind::Socket);
            sample.tree.node_mut(node).metadata.mtime = Timestamp { sec, nsec };
        }
    }
    for mode in [0, 0o777, 0o1777, 0o2755, 0o4755, 0o6711, 0o7777] {
        let node = sample.file(dir, format!("m{mode:o}").as_bytes(), b"#!");
        sample.tree.node_mut(node).metadata.mode = mode;
        let node = sample.dir(dir, format!("d{mode:o}").as_bytes(), meta(mode));
        sample.tree.node_mut(node).metadata.mtime = Timestamp { sec: 5, nsec: 6 };
    }
    for (major, minor) in [
        (0, 0),
        (1, 3),
        (255, 255),
        (256, 256),
        (4095, 0),
        (0, (1 << 20) - 1),
        (4095, (1 << 20) - 1),
    ] {
        let rdev = Rdev { major, minor };
        sample.node(
            dir,
            format!("c{major}-{minor}").as_bytes(),
            NodeKind::CharDevice(rdev),
        );
        sample.node(
            dir,
            format!("b{major}-{minor}").as_bytes(),
            NodeKind::BlockDevice(rdev),
        );
    }
}
