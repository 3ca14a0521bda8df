//! What fuzzers begin with: small inputs of every form that the readers know. Made by a program,
//! so that they can be made anew when a format changes; the same bytes on every machine.

use std::sync::Arc;

use layerpack_erofs::{
    FileData, Metadata, NodeKind, Rdev, Timestamp, Tree, WriteOptions, write_image,
};
use layerpack_fixtures::ScratchDir;
use layerpack_fixtures::tar::{Header, TarWriter, kind};
use layerpack_packer::{BuildOptions, Silent, Source, build};
use layerpack_store::format::profile::{Profile, ProfileEntry, ProfileLayer};
use layerpack_store::registry::document::{INDEX, MANIFEST, TITLE};
use layerpack_store::{Digest, Extent, LayerId, LayerStore, MapBuilder, MemStore};

use crate::{documents, objects};

/// The seeds of a target: file name and bytes.
#[must_use]
pub fn seeds(target: &str) -> Vec<(String, Vec<u8>)> {
    let list = match target {
        "erofs" => erofs(),
        "lpmap" => vec![("map", map()), ("real", store_parts().map)],
        "lploc" => vec![("real", store_parts().locator)],
        "lppack" => vec![("real", store_parts().pack)],
        "lpidx" => vec![("real", store_parts().index)],
        "manifest" => vec![("real", store_parts().manifest)],
        "reference" => vec![
            ("base", b"base/debian:12".to_vec()),
            ("diff", b"diff/a.b-c_d:1.0-rc.1+x".to_vec()),
            ("digest", Digest::of(b"").to_string().into_bytes()),
        ],
        "tar" => archives(),
        "tar_layer" => [archives(), vec![("marks", upper())]].concat(),
        "tar_merge" => vec![("two", pair(&plain(), &upper())), ("empty", pair(&plain(), &TarWriter::new().finish()))],
        "gzip" => vec![("member", gzip(&plain())), ("members", [gzip(&plain()), gzip(b"")].concat())],
        "zstd" => vec![("frame", zstd(&plain())), ("skippable", [skippable(), zstd(&plain()), skippable()].concat())],
        "xz" => vec![("stream", xz(&plain()))],
        "bzip2" => vec![("stream", bzip2(&plain()))],
        "git_index" => vec![("v2", git(2)), ("v3", git(3)), ("v4", git(4))],
        "oci_index" => {
            let manifest = documents::manifest(&documents::sized(&documents::config_seed()));
            let index = documents::index(&documents::sized(manifest.as_bytes()));
            let both = index.replace(
                "\"size\"",
                "\"platform\":{\"os\":\"linux\",\"architecture\":\"amd64\"},\"annotations\":{\"org.opencontainers.image.ref.name\":\"t\"},\"size\"",
            );
            vec![("one", index.into_bytes()), ("named", both.into_bytes())]
        }
        "oci_manifest" => {
            let config = documents::sized(&documents::config_seed());
            vec![("one", documents::manifest(&config).into_bytes())]
        }
        "oci_config" => vec![("one", documents::config_seed())],
        "split" => vec![(
            "all",
            b"leftover = \"drop\"\nhard-links = \"copy\"\n[[part]]\nkind = \"base\"\nat = [\"/\"]\nexcept = [\"*.x\"]\n[[part]]\nkind = \"toolkit\"\nname = \"t\"\nversion = \"2\"\nglobs = [\"usr/**/[a-c]?\"]\n".to_vec(),
        )],
        "lpprof" => vec![("two", profile())],
        "lease" => leases(),
        "signature" => signatures(),
        "registry" => registry(),
        "globs" => vec![("some", b"usr/**\n*.py\n/a/\n[!a-c]*\\]\nb[]x-]?\n**/z".to_vec())],
        _ => Vec::new(),
    };
    list.into_iter()
        .map(|(name, bytes)| (name.to_owned(), bytes))
        .collect()
}

type Seeds = Vec<(&'static str, Vec<u8>)>;

fn must<T, E: std::fmt::Display>(result: Result<T, E>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => panic!("a seed cannot be made: {error}"),
    }
}

fn plain() -> Vec<u8> {
    let mut tar = TarWriter::new();
    tar.dir("./", 0o755)
        .dir("d", 0o700)
        .file("d/f", "contents")
        .symlink("d/l", "f")
        .hard_link("d/h", "d/f")
        .entry(&Header::new(kind::CHAR, "c").device(1, 3), b"")
        .entry(&Header::new(kind::FIFO, "p"), b"");
    tar.finish()
}

fn upper() -> Vec<u8> {
    let mut tar = TarWriter::new();
    tar.whiteout("d", "f")
        .opaque("o")
        .file("o/x", "1")
        .file("d/l", "2")
        .whiteout("", "c");
    tar.finish()
}

fn archives() -> Seeds {
    let mut pax = TarWriter::new();
    pax.pax_global(&[("comment", "c")])
        .pax(&[
            ("path", "long/name"),
            ("mtime", "-1.5"),
            ("uid", "4000000"),
            ("SCHILY.xattr.user.a", "v"),
        ])
        .file("short", "x")
        .pax(&[(
            "SCHILY.acl.access",
            "user::rw-,user:5:r--,group::r--,mask::r--,other::---",
        )])
        .file("acl", "");
    let mut gnu = TarWriter::new();
    gnu.gnu_long(kind::GNU_NAME, &[b'n'; 130])
        .file("cut", "y")
        .gnu_long(kind::GNU_LINK, b"target")
        .symlink("s", "t");
    let mut sparse = TarWriter::new();
    let map = [(0, 3), (4096, 3)];
    sparse
        .sparse_gnu("old", &map, 8192, b"abcdef")
        .sparse_pax_0_0("0.0", &map, 8192, b"abcdef")
        .sparse_pax_0_1("0.1", &map, 8192, b"abcdef")
        .sparse_pax_1_0("1.0", &map, 8192, b"abcdef");
    let mut links = TarWriter::new();
    links
        .symlink("a", "b")
        .symlink("b", "../a/c")
        .file("a/x", "1")
        .file("/abs/../../up", "2");
    vec![
        ("plain", plain()),
        ("pax", pax.finish()),
        ("gnu", gnu.finish()),
        ("sparse", sparse.finish()),
        ("links", links.finish()),
    ]
}

fn pair(lower: &[u8], upper: &[u8]) -> Vec<u8> {
    let len = u32::try_from(lower.len()).unwrap_or_default();
    [&len.to_le_bytes(), lower, upper].concat()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    use std::io::Write as _;
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    must(encoder.write_all(bytes));
    must(encoder.finish())
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    must(zstd::bulk::compress(bytes, 3))
}

fn skippable() -> Vec<u8> {
    [&[0x50, 0x2a, 0x4d, 0x18, 4, 0, 0, 0][..], b"skip"].concat()
}

fn xz(bytes: &[u8]) -> Vec<u8> {
    use std::io::Write as _;
    let mut encoder = liblzma::write::XzEncoder::new(Vec::new(), 1);
    must(encoder.write_all(bytes));
    must(encoder.finish())
}

fn bzip2(bytes: &[u8]) -> Vec<u8> {
    use std::io::Write as _;
    let mut encoder = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::fast());
    must(encoder.write_all(bytes));
    must(encoder.finish())
}

fn erofs() -> Seeds {
    let meta = |sec| Metadata {
        mode: 0o755,
        uid: 70_000,
        gid: 1,
        mtime: Timestamp { sec, nsec: 7 },
        xattrs: [(b"user.a".to_vec(), b"value".to_vec())].into(),
    };
    let mut tree = Tree::new(meta(1));
    let dir = must(tree.insert(tree.root(), b"d", meta(2), NodeKind::Directory));
    must(tree.insert(dir, b"f", meta(1), NodeKind::File(FileData::empty())));
    must(tree.insert(dir, b"l", meta(1), NodeKind::Symlink(b"f".to_vec())));
    must(tree.insert(
        dir,
        b"c",
        meta(1),
        NodeKind::CharDevice(Rdev { major: 1, minor: 3 }),
    ));
    for i in 0..200 {
        let name = format!("file-with-a-name-{i}");
        must(tree.insert(dir, name.as_bytes(), Metadata::default(), NodeKind::Fifo));
    }
    let mut image = Vec::new();
    must(write_image(&tree, &WriteOptions::default(), &mut image));
    vec![("tree", image), ("real", store_parts().meta)]
}

fn map() -> Vec<u8> {
    let mut map = MapBuilder::new(1 << 20);
    for (data_offset, len) in [(0, 100), (4096, 5000), (16384, 4096)] {
        let digest = Digest::of(&[1]);
        map.push(Extent {
            data_offset,
            len,
            digest,
        });
    }
    map.implicit(b"");
    map.implicit(b"usr/lib");
    must(map.build()).to_bytes()
}

/// Objects of a store with one layer.
struct Parts {
    meta: Vec<u8>,
    map: Vec<u8>,
    /// With its map in front.
    locator: Vec<u8>,
    pack: Vec<u8>,
    index: Vec<u8>,
    manifest: Vec<u8>,
}

/// A store with the layer `toolkit/seed:1`.
pub(crate) fn a_store() -> LayerStore {
    built().0
}

/// The same, and the digest of its manifest.
fn built() -> (LayerStore, Digest) {
    let scratch = must(ScratchDir::new("seeds"));
    let mut tar = TarWriter::new();
    tar.file("a", "first")
        .file("b/c", "second")
        .file("d", vec![b'x'; 9000]);
    tar.sparse_gnu("s", &[(0, 3), (128 << 10, 3)], 256 << 10, b"abcdef");
    let path = must(scratch.write("seed.tar", tar.finish()));
    let store = LayerStore::new(Arc::new(MemStore::new()));
    let mut options = BuildOptions::new(must("toolkit/seed:1".parse()), Source::Tar(path));
    options.jobs = 1;
    let digest = must(build(&store, &options, &Silent)).published.digest;
    (store, digest)
}

fn store_parts() -> Parts {
    let (store, digest) = built();
    let manifest = must(store.manifest(&digest));
    let map = must(store.map(&manifest));
    let locator = must(store.locator(&manifest, &map)).to_bytes();
    let object = |prefix: &str| {
        let blobs = store.blobs();
        let list = must(blobs.list(prefix));
        let key = list.first().map(|info| info.key.clone());
        key.and_then(|key| must(blobs.get(&key, 1 << 20)))
            .unwrap_or_default()
    };
    let map = map.to_bytes();
    Parts {
        meta: must(store.meta(&manifest)),
        locator: pair(&map, &locator),
        map,
        pack: object("packs/"),
        index: object("index/"),
        manifest: must(manifest.to_bytes()),
    }
}

fn profile() -> Vec<u8> {
    let layer = |n: u8| ProfileLayer {
        layer: LayerId::from_digest(Digest::of(&[n])),
        manifest: Digest::of(&[n, n]),
    };
    let entry = |layer, extent, rank| ProfileEntry {
        layer,
        extent,
        len: 4096,
        count: 1 + layer,
        rank,
        time_ms: rank * 3,
    };
    let profile = Profile {
        name: "tests".to_owned(),
        layers: vec![layer(1), layer(2)],
        recordings: 2,
        entries: vec![entry(1, 7, 0), entry(0, 3, 1), entry(1, 9, 1)],
    };
    must(profile.to_bytes())
}

fn leases() -> Seeds {
    let (store, digest) = built();
    let keys: Vec<String> = must(store.blobs().list(""))
        .iter()
        .filter(|info| !info.key.as_str().starts_with("refs/"))
        .map(|info| format!("\"{}\"", info.key))
        .collect();
    let keys = keys.join(",");
    let lease = |kind: &str, more: &str| {
        format!(
            r#"{{"format":1,"kind":"{kind}","who":"a machine","started":1700000000,"renewed":1700000001,"ttl":3600,{more}}}"#
        )
        .into_bytes()
    };
    vec![
        (
            "node",
            lease("node", &format!(r#""manifests":["{digest}"]"#)),
        ),
        (
            "session",
            lease(
                "session",
                &format!(r#""knows":["0123456789abcdef0123456789abcdef"],"claims":[{keys}]"#),
            ),
        ),
        ("collector", lease("collector", r#""manifests":[]"#)),
        (
            "list",
            format!(r#"{{"format":1,"who":"a machine","created":1700000000,"keys":[{keys}]}}"#)
                .into_bytes(),
        ),
    ]
}

fn signatures() -> Seeds {
    let Some(key) = objects::signing_key() else {
        return Vec::new();
    };
    let object = |manifest: &[u8]| {
        let (public, signature) = (key.public(), key.sign(&Digest::of(manifest)));
        format!(r#"{{"format":1,"key":"{public}","signature":"{signature}"}}"#).into_bytes()
    };
    vec![
        ("good", object(b"a manifest")),
        ("other", object(b"another manifest")),
        ("secret", key.to_text().into_bytes()),
        ("public", key.public().to_string().into_bytes()),
    ]
}

fn registry() -> Seeds {
    let key = "refs/base/a/_1";
    let (digest, size) = documents::sized(b"bytes");
    let (empty, _) = documents::sized(b"{}");
    let text = format!(
        r#"{{"schemaVersion":2,"mediaType":"{MANIFEST}","artifactType":"application/vnd.layerpack.object.v1","config":{{"mediaType":"application/vnd.oci.empty.v1+json","digest":"{empty}","size":2}},"layers":[{{"mediaType":"application/octet-stream","digest":"{digest}","size":{size},"data":"Ynl0ZXM=","annotations":{{"{TITLE}":"{key}"}}}}],"annotations":{{"layerpack.key":"{key}","layerpack.written":"1700000000"}}}}"#
    )
    .into_bytes();
    let (listed, length) = documents::sized(&text);
    let index = format!(
        r#"{{"schemaVersion":2,"mediaType":"{INDEX}","manifests":[{{"mediaType":"{MANIFEST}","digest":"{listed}","size":{length},"artifactType":"application/vnd.layerpack.object.v1"}}]}}"#
    )
    .into_bytes();
    vec![
        ("manifest", text),
        ("index", index),
        (
            "tags",
            br#"{"name":"x","tags":["refs.base.a.__1","latest","_h0"]}"#.to_vec(),
        ),
        ("no_tags", br#"{"name":"x","tags":null}"#.to_vec()),
        (
            "token",
            br#"{"token":"t","access_token":"t","expires_in":300,"issued_at":"2026-01-02T03:04:05Z"}"#
                .to_vec(),
        ),
        (
            "refusal",
            format!(
                r#"{{"errors":[{{"code":"DENIED","message":"no","detail":{{"digest":"{digest}"}}}}]}}"#
            )
            .into_bytes(),
        ),
        (
            "challenge",
            br#"Bearer realm="http://127.0.0.1:1/token",service="s",scope="repository:x:pull,push", Basic realm="r""#
                .to_vec(),
        ),
    ]
}

/// An index of `a` and `b` without the hash at its end, which the target leaves out.
fn git(version: u32) -> Vec<u8> {
    let mut bytes = b"DIRC".to_vec();
    bytes.extend_from_slice(&version.to_be_bytes());
    bytes.extend_from_slice(&2u32.to_be_bytes());
    // The ids of "hello\n" and of a link to "a".
    let entries: [(&[u8], u32, [u8; 20]); 2] = [
        (
            b"a",
            0o100_644,
            *b"\xce\x01\x36\x25\x03\x0b\xa8\xdb\xa9\x06\xf7\x56\x96\x7f\x9e\x9c\xa3\x94\x46\x4a",
        ),
        (
            b"b",
            0o120_000,
            *b"\x2e\x65\xef\xe2\xa1\x45\xdd\xa7\xee\x51\xd1\x74\x12\x99\xf8\x48\xe5\xbf\x75\x2e",
        ),
    ];
    for (path, mode, id) in entries {
        let start = bytes.len();
        bytes.extend_from_slice(&[0; 24]);
        bytes.extend_from_slice(&mode.to_be_bytes());
        bytes.extend_from_slice(&[0; 12]);
        bytes.extend_from_slice(&id);
        let flags: u16 = if version == 3 { 0x4001 } else { 1 };
        bytes.extend_from_slice(&flags.to_be_bytes());
        if version == 3 {
            bytes.extend_from_slice(&[0; 2]);
        }
        if version == 4 {
            bytes.push(u8::from(path == b"b"));
            bytes.extend_from_slice(path);
            bytes.push(0);
        } else {
            bytes.extend_from_slice(path);
            let len = bytes.len() - start;
            bytes.extend(std::iter::repeat_n(0, 8 - len % 8));
        }
    }
    bytes.extend_from_slice(b"TREE\0\0\0\x04\0-1 ");
    bytes
}
