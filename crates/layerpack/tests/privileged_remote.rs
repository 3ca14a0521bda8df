//! Remote stores from the command line: built into a bucket, mounted and run from it, read over
//! the web.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

mod support;

use std::path::{Path, PathBuf};

use layerpack_fixtures::servers::{
    ACCESS_KEY, BUCKET, DockerRegistry, Nginx, S3Behaviour, S3Server, SECRET_KEY,
};
use layerpack_fixtures::treecmp::{self, Options};
use layerpack_fixtures::{MountGuard, is_root, skip};
use support::{Node, mounts, processes};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A node whose store is a bucket, and whose user's key is in the environment.
fn node(label: &str, server: &S3Server) -> Node {
    let mut node = Node::new(label);
    node.environment = [
        ("LAYERPACK_STORE", server.store("team/layers").as_str()),
        ("AWS_ACCESS_KEY_ID", ACCESS_KEY),
        ("AWS_SECRET_ACCESS_KEY", SECRET_KEY),
        // Nothing of the caller's own.
        ("AWS_CONFIG_FILE", "/dev/null"),
        ("AWS_SHARED_CREDENTIALS_FILE", "/dev/null"),
        ("AWS_EC2_METADATA_DISABLED", "true"),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .to_vec();
    node
}

fn source(node: &Node) -> PathBuf {
    let source = node.scratch.mkdir("source").unwrap();
    support::rootfs::make(&source);
    let noise = layerpack_fixtures::rng::Rng::new(1).bytes(12 << 20);
    fs_err::write(source.join("var/data/big"), noise).unwrap();
    source
}

#[test]
fn a_bucket_as_the_store() {
    let server = S3Server::start(S3Behaviour::default()).unwrap();
    let node = node("bucket", &server);
    let source = source(&node);
    let digest = node.build("base/tree:1", &source, &[]);
    assert_eq!(node.build("base/tree:1", &source, &[]), digest);
    assert!(node.ok(["ls"]).contains("base/tree:1"));
    node.ok(["verify", "base/tree:1"]);
    // The same in a directory has the same digest.
    let local = node.scratch.join("local");
    let from = format!("dir:{}", source.display());
    let line = node.ok([
        "-q",
        "--store",
        text(&local),
        "build",
        "--kind",
        "base",
        "--name",
        "tree",
        "--version",
        "1",
        "--from",
        &from,
    ]);
    assert!(line.contains(&digest), "{line} {digest}");

    // Manifests that were looked at once are kept, and a damaged copy is no harm.
    let objects = node.scratch.join("cache/objects");
    let asked = || {
        let before = server.requests();
        assert!(node.ok(["ls"]).contains("base/tree:1"));
        node.ok(["inspect", "base/tree:1"]);
        server.requests() - before
    };
    fs_err::remove_dir_all(&objects).unwrap();
    let first = asked();
    assert!(asked() < first);
    for entry in fs_err::read_dir(&objects).unwrap() {
        fs_err::write(entry.unwrap().path(), "damaged").unwrap();
    }
    assert_eq!(asked(), first);

    // What goes wrong is one line that names store and object.
    let error = node.fails(1, ["inspect", "base/none:1"]);
    assert!(error.contains("s3://layers/team/layers"), "{error}");
    let mut command = node.command();
    command.env("AWS_SECRET_ACCESS_KEY", "wrong").arg("ls");
    let error = support::one_error(1, &command.output().unwrap());
    assert!(error.contains("credentials"), "{error}");
    let error = node.fails(2, ["--store", "s3://layers/x?colour=red", "ls"]);
    assert!(error.contains("colour"), "{error}");
    let mut command = node.command();
    command
        .env("LAYERPACK_STORE_OPTIONS", "retries=many")
        .arg("ls");
    let error = support::one_error(1, &command.output().unwrap());
    assert!(error.contains("LAYERPACK_STORE_OPTIONS"), "{error}");

    node.ok(["rm", "base/tree:1"]);
    assert!(!node.ok(["ls"]).contains("base/tree:1"));
}

#[test]
fn privileged_mounts_and_sandboxes_from_a_bucket() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let server = S3Server::start(S3Behaviour {
        throttles_every: Some(11),
        ..S3Behaviour::default()
    })
    .unwrap();
    let node = node("bucketmount", &server);
    let source = source(&node);
    node.build("base/tree:1", &source, &[]);
    let point = node.scratch.mkdir("mnt").unwrap();
    let before = server.requests();
    node.ok(["mount", "base/tree:1", text(&point)]);
    let guard = MountGuard::new(&point);
    let mounted = server.requests() - before;

    // Lazily: a mount needs a few objects, the data comes when it is read.
    let status = node.json(["daemon", "status"]);
    let fetched = |status: &serde_json::Value| {
        status["node"]["layers"][0]["fetched_bytes"]
            .as_u64()
            .unwrap_or(0)
    };
    assert!(fetched(&status) < 6 << 20, "{status}");
    let tree = treecmp::snapshot(&source, &Options::default()).unwrap();
    let seen = treecmp::snapshot(&point, &Options::default())
        .unwrap_or_else(|e| panic!("{e}: {}", node.log()));
    treecmp::assert_same(&tree, &seen);
    assert!(
        server.requests() - before > mounted,
        "what was read came from the bucket"
    );

    let output = node.ok([
        "run",
        "--rm",
        "base/tree:1",
        "--",
        "/bin/sh",
        "-c",
        "echo from a bucket",
    ]);
    assert_eq!(output, "from a bucket\n");
    node.ok(["umount", text(&point)]);
    drop(guard);
    node.ok(["daemon", "stop"]);
    assert_eq!(mounts(&node), Vec::<PathBuf>::new());
    assert_eq!(processes(&node), Vec::<String>::new());
}

/// The bucket's files behind a web server: whoever may read them needs no key. Beside it, as the
/// first address of a store that cannot be reached.
#[test]
fn privileged_mounts_over_the_web_and_from_a_mirror() {
    if !is_root() {
        skip!("needs root to mount");
    }
    if Nginx::program().is_none() {
        skip!("nginx is not installed");
    }
    let server = S3Server::start(S3Behaviour::default()).unwrap();
    let node = node("web", &server);
    let source = source(&node);
    node.build("base/tree:1", &source, &[]);
    // A profile, made on another node so that this one has nothing.
    let mut recorder = Node::new("web-recorder");
    recorder.environment = node.environment.clone();
    let at = recorder.scratch.mkdir("mnt").unwrap();
    recorder.ok(["mount", "base/tree:1", text(&at)]);
    let guard = MountGuard::new(&at);
    recorder.ok(["profile", "record", "--start", text(&at)]);
    fs_err::read(at.join("var/data/big")).unwrap();
    recorder.ok([
        "profile",
        "record",
        "--stop",
        text(&at),
        "--store-as",
        "big",
    ]);
    let profiles = recorder.json(["profile", "ls"]);
    let profile = profiles[0]["digest"].as_str().unwrap();
    recorder.ok(["umount", text(&at)]);
    drop(guard);
    recorder.ok(["daemon", "stop"]);
    let web = Nginx::start(&server.root_dir()).unwrap();
    let web = format!("{}/{BUCKET}/team/layers", web.url());
    let tree = treecmp::snapshot(&source, &Options::default()).unwrap();

    for (i, store) in [
        web.clone(),
        format!("http://127.0.0.1:1/gone?retries=0,{web}"),
    ]
    .into_iter()
    .enumerate()
    {
        let point = node.scratch.mkdir(format!("mnt{i}")).unwrap();
        let error = node.fails(1, ["--store", &store, "ls"]);
        assert!(error.starts_with("error: "), "{error}");
        // Nothing can be listed there: a profile is found by its whole digest.
        let by_name = [
            "--store",
            &store,
            "mount",
            "--profile",
            "big",
            "base/tree:1",
        ];
        node.fails(1, by_name.into_iter().chain([text(&point)]));
        let mount = [
            "--store",
            &store,
            "mount",
            "--profile",
            profile,
            "base/tree:1",
        ];
        node.ok(mount.into_iter().chain([text(&point)]));
        let guard = MountGuard::new(&point);
        let ahead = || {
            let status = node.json(["daemon", "status"]);
            status["node"]["layers"][0]["prefetched_bytes"].as_u64()
        };
        assert!(support::wait_until(|| ahead() >= Some(12 << 20)));
        let seen = treecmp::snapshot(&point, &Options::default()).unwrap();
        treecmp::assert_same(&tree, &seen);
        node.ok(["umount", text(&point)]);
        drop(guard);
        node.ok(["daemon", "stop"]);
        // The next one is not to be served from this one's cache.
        fs_err::remove_dir_all(node.root()).unwrap();
    }
    assert_eq!(mounts(&node), Vec::<PathBuf>::new());
}

/// A mirror that goes away between two reads of one mount: the other one serves on.
#[test]
fn privileged_a_mirror_dies_under_a_mount() {
    if !is_root() {
        skip!("needs root to mount");
    }
    if Nginx::program().is_none() {
        skip!("nginx is not installed");
    }
    let node = Node::new("mirrors");
    let source = node.scratch.mkdir("source").unwrap();
    let content = |file: u64| layerpack_fixtures::rng::Rng::new(file + 1).bytes(1 << 20);
    for file in 0..24 {
        fs_err::write(source.join(format!("f{file:02}")), content(file)).unwrap();
    }
    node.build("base/tree:1", &source, &[]);
    let first = Nginx::start(node.scratch.path()).unwrap();
    let second = Nginx::start(node.scratch.path()).unwrap();
    let store = format!("{}/store?retries=1,{}/store", first.url(), second.url());
    let point = node.scratch.mkdir("mnt").unwrap();
    node.ok(["--store", &store, "mount", "base/tree:1", text(&point)]);
    let guard = MountGuard::new(&point);
    let read = |file: u64| {
        let bytes = fs_err::read(point.join(format!("f{file:02}")))
            .unwrap_or_else(|e| panic!("{e}: {}", node.log()));
        assert!(bytes == content(file), "f{file:02}: wrong bytes");
    };
    read(0);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| (1..24).for_each(read));
        read(12);
        drop(first);
        reader.join().unwrap();
    });
    drop(second);
    // What is here needs no store.
    (0..24).for_each(read);
    node.ok(["umount", text(&point)]);
    drop(guard);
    node.ok(["daemon", "stop"]);
    assert_eq!(mounts(&node), Vec::<PathBuf>::new());
}

#[test]
fn privileged_mounts_and_sandboxes_from_a_registry() {
    if !is_root() {
        skip!("needs root to mount");
    }
    if DockerRegistry::program().is_none() {
        skip!("docker-registry is not installed");
    }
    let server = DockerRegistry::start().unwrap();
    let mut node = Node::new("registrymount");
    let store = format!("oci://{}/team/layers", server.host());
    node.environment = vec![("LAYERPACK_STORE".to_owned(), store)];
    let source = source(&node);
    node.build("base/tree:1", &source, &[]);
    let point = node.scratch.mkdir("mnt").unwrap();
    node.ok(["mount", "base/tree:1", text(&point)]);
    let guard = MountGuard::new(&point);
    let tree = treecmp::snapshot(&source, &Options::default()).unwrap();
    let seen = treecmp::snapshot(&point, &Options::default())
        .unwrap_or_else(|e| panic!("{e}: {}", node.log()));
    treecmp::assert_same(&tree, &seen);
    let command = ["run", "--rm", "base/tree:1", "--", "/bin/sh", "-c"];
    let output = node.ok(command.iter().chain(&["echo from a registry"]));
    assert_eq!(output, "from a registry\n");
    node.ok(["umount", text(&point)]);
    drop(guard);
    node.ok(["daemon", "stop"]);
    assert_eq!(mounts(&node), Vec::<PathBuf>::new());
    assert_eq!(processes(&node), Vec::<String>::new());
}
