//! Nodes that read from each other's caches.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "tests"
)]

mod common;

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use common::{Fixture, Gauge, LONG, config, fixture, noise, publish, read};
use layerpack_fixtures::guards::mounts_below;
use layerpack_fixtures::{ScratchDir, is_root, skip};
use layerpack_layerfs::fetch::{Blob, FetchConfig, Fetcher};
use layerpack_layerfs::peers::{PEER_FAILURES, PeerLink, PeersConfig};
use layerpack_layerfs::{LayerfsError, LeaseSpec, Node, NodeConfig};
use layerpack_store::peer::{PeerClient, PeerError, PeerSource, PeerToken};
use layerpack_store::{BlobStore, FileStore, LayerId, LayerStore, MemStore};

/// Ports that are free now, for nodes that must know each other before they start.
fn ports(count: usize) -> Vec<SocketAddr> {
    let held: Vec<TcpListener> = (0..count)
        .map(|_| TcpListener::bind("127.0.0.1:0").unwrap())
        .collect();
    held.iter().map(|l| l.local_addr().unwrap()).collect()
}

fn source(address: SocketAddr) -> PeerSource {
    format!("http://{address}").parse().unwrap()
}

fn peers_of(own: Option<SocketAddr>, all: &[SocketAddr]) -> PeersConfig {
    PeersConfig {
        listen: own,
        // A list that is the same for all: it holds its reader too.
        sources: all.iter().map(|a| source(*a)).collect(),
        token: Some(PeerToken::new("0123456789abcdef").unwrap()),
        patience: Duration::from_secs(5),
    }
}

/// One node's data path: a blob of the layer, its fetcher, its peers.
struct Site {
    blob: Arc<Blob>,
    link: Option<PeerLink>,
}

fn site(f: &Fixture, gauge: &Arc<Gauge>, number: usize, peers: &PeersConfig) -> Site {
    site_with(f, gauge, number, peers, config())
}

fn site_with(
    f: &Fixture,
    gauge: &Arc<Gauge>,
    number: usize,
    peers: &PeersConfig,
    limits: FetchConfig,
) -> Site {
    let store: Arc<dyn BlobStore> = gauge.clone();
    let blob = f.blob(store, &f.scratch.join(format!("cache{number}")), limits);
    let own = format!("node{number}");
    let link = PeerLink::start(peers, &own, blob.fetcher()).unwrap();
    Site { blob, link }
}

fn wait_until(done: impl Fn() -> bool) -> bool {
    let begun = Instant::now();
    while begun.elapsed() < LONG {
        if done() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    false
}

fn know_each_other(sites: &[Site], others: u64) {
    for site in sites {
        let link = site.link.as_ref().unwrap();
        assert!(
            wait_until(|| link.status().members == others),
            "{:?}",
            link.list()
        );
    }
}

fn frames(f: &Fixture) -> u64 {
    f.locator().frames().len() as u64
}

/// Frames that the nodes fetched from the store, together.
fn fetched(sites: &[Site]) -> u64 {
    let raw: u64 = sites
        .iter()
        .map(|s| s.blob.fetcher().meter().fetched_raw)
        .sum();
    raw
}

fn raw_bytes(f: &Fixture) -> u64 {
    let locator = f.locator();
    locator.frames().iter().map(|x| u64::from(x.raw_len)).sum()
}

/// Reads the whole layer in pieces, and compares.
fn read_all(site: &Site, data: &[u8], piece: usize) {
    for offset in (0..data.len()).step_by(piece) {
        read(&site.blob, data, offset as u64, piece).unwrap();
    }
}

#[test]
fn a_burst_of_eight_reads_each_frame_about_once() {
    let f = fixture(Arc::new(MemStore::new()));
    let gauge = Gauge::new(f.blobs.clone());
    let all = ports(8);
    let sites: Vec<Site> = (0..8)
        .map(|i| site(&f, &gauge, i, &peers_of(Some(all[i]), &all)))
        .collect();
    know_each_other(&sites, 7);
    let before = gauge.bytes.load(Ordering::SeqCst);
    std::thread::scope(|scope| {
        for site in &sites {
            scope.spawn(|| read_all(site, &f.data, 100_000));
        }
    });
    let (raw, whole) = (fetched(&sites), raw_bytes(&f));
    println!(
        "{} frames; fetched {raw} of {whole} bytes; {} requests; {:?}",
        frames(&f),
        gauge.ranges.load(Ordering::SeqCst),
        sites
            .iter()
            .map(|s| s.link.as_ref().unwrap().status())
            .collect::<Vec<_>>()
    );
    assert!(raw >= whole);
    assert!(raw * 10 <= whole * 13, "{raw} of {whole} bytes");
    let bytes = gauge.bytes.load(Ordering::SeqCst) - before;
    let stored = f.locator().stored_bytes();
    assert!(
        bytes * 10 <= stored * 13,
        "{bytes} of {stored} stored bytes"
    );
    for site in &sites {
        let status = site.link.as_ref().unwrap().status();
        let damaged = status.failures[PEER_FAILURES.len() - 1];
        assert!(status.received > 0 && damaged == 0, "{status:?}");
    }
    let given: u64 = sites
        .iter()
        .map(|s| s.link.as_ref().unwrap().status().served)
        .sum();
    assert!(given > 5 * whole, "{given}: seven of eight came from peers");
}

#[test]
fn one_that_dies_in_the_middle_is_done_without() {
    let f = fixture(Arc::new(MemStore::new()));
    let gauge = Gauge::new(f.blobs.clone());
    let all = ports(4);
    let mut sites: Vec<Site> = (0..4)
        .map(|i| site(&f, &gauge, i, &peers_of(Some(all[i]), &all)))
        .collect();
    know_each_other(&sites, 3);
    let dying = sites.pop().unwrap();
    let progress = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for site in &sites {
            let (progress, data) = (&progress, &f.data);
            scope.spawn(move || {
                for offset in (0..data.len()).step_by(50_000) {
                    read(&site.blob, data, offset as u64, 50_000).unwrap();
                    progress.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        let half = f.data.len() as u64 / 50_000;
        assert!(wait_until(|| progress.load(Ordering::SeqCst) > half));
        drop(dying.link);
    });
    let (raw, whole) = (fetched(&sites), raw_bytes(&f));
    assert!(raw < 2 * whole, "{raw} of {whole}");
    // It comes back under the same address, and is asked again.
    let again = site(&f, &gauge, 9, &peers_of(Some(all[3]), &all));
    know_each_other(&sites, 3);
    read_all(&again, &f.data, 100_000);
    assert!(again.link.as_ref().unwrap().status().received > 0);
}

/// A peer that is none: says who it is, and then does something else.
struct Impostor {
    address: SocketAddr,
    asked: Arc<AtomicU64>,
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Clone, Copy, PartialEq)]
enum Manner {
    /// Bytes that are wrong.
    Lies,
    /// Answers for extents that nobody asked for.
    Babbles,
    /// More bytes than were asked for.
    Floods,
    /// Nothing at all.
    Hangs,
    /// A byte now and then.
    Drips,
    /// The beginning of the answer.
    Cuts,
}

impl Impostor {
    fn new(manner: Manner) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (asked, ended) = (
            Arc::new(AtomicU64::new(0)),
            Arc::new(AtomicBool::new(false)),
        );
        let (counter, over) = (Arc::clone(&asked), Arc::clone(&ended));
        let thread = std::thread::spawn(move || {
            let mut threads = Vec::new();
            for stream in listener.incoming() {
                if over.load(Ordering::SeqCst) {
                    break;
                }
                let (counter, over) = (Arc::clone(&counter), Arc::clone(&over));
                threads.push(std::thread::spawn(move || {
                    let _ = answer(stream.unwrap(), manner, &counter, &over);
                }));
            }
            for thread in threads {
                thread.join().unwrap();
            }
        });
        Self {
            address,
            asked,
            ended,
            thread: Some(thread),
        }
    }
}

impl Drop for Impostor {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
        drop(TcpStream::connect(self.address));
        let _ = self.thread.take().unwrap().join();
    }
}

fn answer(
    mut stream: TcpStream,
    manner: Manner,
    asked: &AtomicU64,
    over: &AtomicBool,
) -> std::io::Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(1)))?;
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).unwrap();
    if head.starts_with("GET /v1/node ") {
        let text = "HTTP/1.1 200 OK\r\nlayerpack-node: impostor\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
        return stream.write_all(text.as_bytes());
    }
    asked.fetch_add(1, Ordering::SeqCst);
    let of = head
        .split("?of=")
        .nth(1)
        .unwrap()
        .split('&')
        .next()
        .unwrap();
    let reply = |stream: &mut TcpStream, of: &str, len: usize, body: &[u8]| {
        let text = format!(
            "HTTP/1.1 200 OK\r\nlayerpack-extents: {of}\r\ncontent-length: {len}\r\nconnection: close\r\n\r\n"
        );
        stream.write_all(text.as_bytes())?;
        stream.write_all(body)
    };
    match manner {
        Manner::Lies => {
            // As long as it must be, for the layer of these tests.
            let lens = LENGTHS.get().unwrap();
            let len = numbers(of).map(|i| lens[i]).sum();
            reply(&mut stream, of, len, &noise(77, len))
        }
        Manner::Babbles => reply(&mut stream, "4294967295", 3, b"abc"),
        Manner::Floods => reply(&mut stream, of, 1 << 40, &[0; 4096]),
        Manner::Cuts => reply(&mut stream, of, 1000, b"ab"),
        Manner::Hangs | Manner::Drips => {
            let begun = Instant::now();
            while !over.load(Ordering::SeqCst) && begun.elapsed() < LONG {
                std::thread::sleep(Duration::from_millis(20));
                if manner == Manner::Drips {
                    stream.write_all(b"H")?;
                }
            }
            Ok(())
        }
    }
}

/// Lengths of the sample layer's extents.
static LENGTHS: std::sync::OnceLock<Vec<usize>> = std::sync::OnceLock::new();

fn numbers(of: &str) -> impl Iterator<Item = usize> + '_ {
    of.split(',').flat_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        first.parse::<usize>().unwrap()..=last.parse::<usize>().unwrap()
    })
}

#[test]
fn peers_that_lie_or_hang_cost_time_within_limits_and_nothing_else() {
    let f = fixture(Arc::new(MemStore::new()));
    let lens = f.map().extents().iter().map(|e| e.len as usize).collect();
    LENGTHS.set(lens).unwrap();
    for (number, (manner, kind)) in [
        (Manner::Lies, "damaged"),
        (Manner::Babbles, "failed"),
        (Manner::Floods, "failed"),
        (Manner::Cuts, "failed"),
        (Manner::Hangs, "timeout"),
        (Manner::Drips, "timeout"),
    ]
    .into_iter()
    .enumerate()
    {
        let impostor = Impostor::new(manner);
        let gauge = Gauge::new(f.blobs.clone());
        let peers = PeersConfig {
            patience: Duration::from_millis(300),
            // It does not listen itself: everything has its home at the impostor.
            ..peers_of(None, &[impostor.address])
        };
        let site = site(&f, &gauge, number, &peers);
        let link = site.link.as_ref().unwrap();
        assert!(wait_until(|| link.status().members == 1));
        read_all(&site, &f.data, 300_000);
        let status = link.status();
        let at = PEER_FAILURES.iter().position(|k| *k == kind).unwrap();
        assert!(status.failures[at] > 0, "{kind}: {status:?}");
        assert_eq!(status.received, 0, "{kind}");
        assert_eq!(site.blob.fetcher().meter().errors, [0; 6]);
        // It is put aside: not everything was asked of it.
        let asked = impostor.asked.load(Ordering::SeqCst);
        assert!((1..frames(&f)).contains(&asked), "{kind}: {asked}");
        assert!(fetched(&[site]) >= raw_bytes(&f));
    }
}

#[test]
fn data_is_given_to_who_knows_the_token_and_of_served_layers_only() {
    let f = fixture(Arc::new(MemStore::new()));
    let gauge = Gauge::new(f.blobs.clone());
    let all = ports(1);
    let site = site(&f, &gauge, 0, &peers_of(Some(all[0]), &[]));
    let ask = |layer: LayerId, fill: bool| layerpack_store::peer::PeerAsk {
        layer,
        extents: vec![0, 1],
        fill,
    };
    let own = site.blob.layer();
    let lens: u64 = f.map().extents()[..2]
        .iter()
        .map(|e| u64::from(e.len))
        .sum();
    for token in [
        None,
        Some(PeerToken::new("another-token-of-theirs").unwrap()),
    ] {
        let stranger = PeerClient::new(all[0], token);
        assert!(matches!(stranger.node(LONG), Err(PeerError::Refused)));
        let answer = stranger.extents(&ask(own, true), lens, LONG);
        assert!(matches!(answer, Err(PeerError::Refused)));
    }
    // A node with another token is told so, and says it: by a count, and by peer.
    let wrong = PeersConfig {
        token: Some(PeerToken::new("another-token-of-theirs").unwrap()),
        ..peers_of(None, &all)
    };
    let fetcher = Fetcher::new(config());
    let link = PeerLink::start(&wrong, "stranger", &fetcher).unwrap();
    let link = link.unwrap();
    let refused = PEER_FAILURES.iter().position(|kind| *kind == "refused");
    let refused = refused.unwrap();
    assert!(
        wait_until(|| link.status().failures[refused] > 0 && link.list()[0].refused),
        "{:?}",
        link.list()
    );
    drop(link);
    let token = PeerToken::new("0123456789abcdef").unwrap();
    let friend = PeerClient::new(all[0], Some(token));
    assert_eq!(friend.node(LONG).unwrap(), "node0");
    let other = LayerId::from_digest(layerpack_store::Digest::of(b"other"));
    let answer = friend.extents(&ask(other, true), lens, LONG);
    assert!(matches!(answer, Err(PeerError::Absent)));
    // What is not here is not given without being fetched; nothing but right bytes is given.
    let empty = friend.extents(&ask(own, false), lens, LONG).unwrap();
    assert_eq!((empty.extents.len(), empty.bytes.len()), (0, 0));
    assert_eq!(gauge.ranges.load(Ordering::SeqCst), 0);
    let full = friend.extents(&ask(own, true), lens, LONG).unwrap();
    assert_eq!(full.extents, [0, 1]);
    let first = f.map().extents()[0];
    assert!(full.bytes[..first.len as usize] == f.data[..first.len as usize]);
    // What is damaged on the node's disk is fetched again, not passed on.
    site.blob.fetcher().evict_blob(&site.blob);
    let gone = friend.extents(&ask(own, false), lens, LONG).unwrap();
    assert!(gone.extents.is_empty());

    // Without a token only this machine may listen.
    let open = PeersConfig {
        token: None,
        ..peers_of(Some("0.0.0.0:0".parse().unwrap()), &[])
    };
    let fetcher = Fetcher::new(config());
    let error = PeerLink::start(&open, "x", &fetcher).unwrap_err();
    assert!(error.to_string().contains("token"), "{error}");
    let nothing = PeerLink::start(&PeersConfig::default(), "x", &fetcher);
    assert!(nothing.unwrap().is_none());
}

#[test]
fn a_full_cache_still_helps_and_is_helped() {
    let f = fixture(Arc::new(MemStore::new()));
    let gauge = Gauge::new(f.blobs.clone());
    let all = ports(2);
    let small = FetchConfig {
        cache_max: Some(64 << 10),
        ..config()
    };
    let sites: Vec<Site> = (0..2)
        .map(|i| site_with(&f, &gauge, i, &peers_of(Some(all[i]), &all), small))
        .collect();
    know_each_other(&sites, 1);
    for site in &sites {
        read_all(site, &f.data, 70_000);
    }
    let received: u64 = sites
        .iter()
        .map(|s| s.link.as_ref().unwrap().status().received)
        .sum();
    assert!(received > 0);
}

/// Unmounts what a failed test leaves.
struct Cleanup(PathBuf);

impl Drop for Cleanup {
    fn drop(&mut self) {
        for mount in mounts_below(&self.0).into_iter().rev() {
            let _ = layerpack_sys::mount::unmount(&mount, true);
        }
    }
}

#[test]
fn privileged_eight_nodes_mount_and_read_the_same_layer() {
    if !is_root() || !std::path::Path::new("/dev/fuse").exists() {
        skip!("needs root and /dev/fuse");
    }
    let scratch = ScratchDir::new("peer-nodes").unwrap();
    let _cleanup = Cleanup(scratch.path().to_owned());
    let files: Arc<dyn BlobStore> = Arc::new(FileStore::new(scratch.join("store")).unwrap());
    let gauge = Gauge::new(files);
    let store = LayerStore::new(gauge.clone());
    let tree = scratch.join("source");
    std::fs::create_dir_all(&tree).unwrap();
    for i in 0..12 {
        std::fs::write(tree.join(format!("{i}")), noise(i, 1 << 20)).unwrap();
    }
    let layer = publish(&store, "base/sample:1", &tree, &[]);
    let manifest = store.manifest(&layer.digest).unwrap();
    let map = store.map(&manifest).unwrap();
    let stored = store.locator(&manifest, &map).unwrap().stored_bytes();
    let all = ports(8);
    let mut nodes = Vec::new();
    for (i, own) in all.iter().enumerate() {
        let mut settings = NodeConfig::recommended(scratch.join(format!("root{i}")));
        settings.peers = peers_of(Some(*own), &all);
        settings.fetch.read_timeout = LONG;
        match Node::start(settings) {
            Ok(node) => nodes.push(node),
            Err(e @ LayerfsError::Unsupported { .. }) => skip!("{e}"),
            Err(e) => panic!("{e}"),
        }
    }
    for node in &nodes {
        assert!(wait_until(|| node.metrics().peers.members == 7));
    }
    let lease = LeaseSpec {
        id: "one".to_owned(),
        owner: "test".to_owned(),
        pid: None,
    };
    let dirs: Vec<PathBuf> = nodes
        .iter()
        .map(|node| {
            let stack = node.stack_up(&store, &[layer.digest], &lease).unwrap();
            stack.lowers[0].clone()
        })
        .collect();
    gauge.bytes.store(0, Ordering::SeqCst);
    std::thread::scope(|scope| {
        for dir in &dirs {
            scope.spawn(move || {
                for i in 0..12 {
                    let bytes = std::fs::read(dir.join(format!("{i}"))).unwrap();
                    assert!(bytes == noise(i, 1 << 20), "{} {i}", dir.display());
                }
            });
        }
    });
    let bytes = gauge.bytes.load(Ordering::SeqCst);
    println!("{bytes} of {stored} stored bytes for eight nodes");
    assert!(bytes * 10 <= stored * 13, "{bytes} of {stored}");
    let status = nodes[0].status();
    assert_eq!(status.peers.len(), 8, "the list holds its reader");
    assert!(status.layers[0].from_peers_bytes > 0);
    for node in &nodes {
        node.release("one").unwrap();
        node.stop(false).unwrap();
    }
    drop(nodes);
    assert_eq!(mounts_below(scratch.path()), Vec::<PathBuf>::new());
}
