//! How fast ranges are read through our backends, beside plain clients, from one nginx on this
//! machine: `cargo run --release -p layerpack-store --example ranged_reads [-- --mib N] [--json]`.
//!
//! * `socket`: a client of this file's own on bare sockets, one connection a thread: the floor.
//! * `reqwest`: the plain HTTP client, as a program that only reads would use it: one task for
//!   each request at once.
//! * `http`, `s3`: `get_range` of the two backends as `open` makes them, from as many threads.
//!
//! Each figure is the median of several rounds; the clients take turns within a round, so that a
//! busy machine slows all of them. nginx takes its part of the same processors.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    clippy::indexing_slicing,
    clippy::cast_precision_loss,
    reason = "a measuring tool"
)]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use layerpack_fixtures::ScratchDir;
use layerpack_fixtures::servers::Nginx;
use layerpack_store::{BlobStore, Key, OpenOptions, S3Credentials, open};

const FILE_MIB: u64 = 256;
const ROUNDS: usize = 5;
const SIZES: [u64; 4] = [64 << 10, 256 << 10, 1 << 20, 4 << 20];
const CLIENTS: [&str; 4] = ["socket", "reqwest", "http", "s3"];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let json = arguments.iter().any(|a| a == "--json");
    // Read per measurement.
    let mib = arguments
        .iter()
        .position(|a| a == "--mib")
        .and_then(|at| arguments.get(at + 1)?.parse().ok())
        .unwrap_or(512_u64);

    let dir = ScratchDir::new("ranged").unwrap();
    let store = dir.mkdir("store").unwrap();
    fs_err::create_dir_all(store.join("packs/aa")).unwrap();
    let mut file = fs_err::File::create(store.join("packs/aa/x")).unwrap();
    let mut random = fastrand::Rng::with_seed(1);
    let mut block = vec![0; 1 << 20];
    for _ in 0..FILE_MIB {
        random.fill(&mut block);
        file.write_all(&block).unwrap();
    }
    drop(file);
    let nginx = Nginx::start(dir.path()).unwrap();
    let key = Key::new("packs/aa/x").unwrap();
    let http = open(&format!("{}/store", nginx.url()), &OpenOptions::default()).unwrap();
    let s3 = open(
        &format!("s3://store/?endpoint={}&region=x", nginx.url()),
        &OpenOptions {
            // nginx looks at no signature.
            s3_credentials: Some(S3Credentials {
                access_key: "x".to_owned(),
                secret_key: "x".to_owned(),
                session_token: None,
            }),
            ..OpenOptions::default()
        },
    )
    .unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();

    if !json {
        println!("range      at once   client     MB/s   requests/s   of reqwest   requests/GiB");
    }
    for size in SIZES {
        for at_once in [1, 4, 16] {
            let total = mib << 20;
            let mut times = vec![Vec::new(); CLIENTS.len()];
            let mut requests = [0; CLIENTS.len()];
            for _ in 0..ROUNDS {
                for (i, client) in CLIENTS.into_iter().enumerate() {
                    let work = Work::new(total, size);
                    let begun = Instant::now();
                    match client {
                        "socket" => sockets(nginx.address(), at_once, &work),
                        "reqwest" => tasks(&runtime, &nginx.url(), at_once, &work),
                        "http" => threads(&http, &key, at_once, &work),
                        _ => threads(&s3, &key, at_once, &work),
                    }
                    times[i].push(begun.elapsed());
                    requests[i] = work.next.load(Ordering::Relaxed).min(work.count);
                }
            }
            let median = |i: usize| {
                let mut sorted: Vec<Duration> = times[i].clone();
                sorted.sort();
                sorted[ROUNDS / 2].as_secs_f64()
            };
            for (i, client) in CLIENTS.into_iter().enumerate() {
                let seconds = median(i);
                let megabytes = total as f64 / 1e6 / seconds;
                let rate = requests[i] as f64 / seconds;
                let part = median(1) / seconds;
                let per_gib = requests[i] as f64 / (total as f64 / f64::from(1 << 30));
                if json {
                    println!(
                        "{{\"range\":{size},\"at_once\":{at_once},\"client\":\"{client}\",\"mb_per_s\":{megabytes:.1},\"requests_per_s\":{rate:.0},\"of_reqwest\":{part:.3},\"requests_per_gib\":{per_gib:.0}}}"
                    );
                } else {
                    println!(
                        "{:>5} KiB {at_once:>8}   {client:<8} {megabytes:>6.0} {rate:>12.0} {:>11.0}% {per_gib:>14.0}",
                        size >> 10,
                        part * 100.0
                    );
                }
            }
        }
    }
}

/// Ranges of one size at places without an order, until enough bytes were read.
struct Work {
    size: u64,
    count: u64,
    next: AtomicU64,
}

impl Work {
    fn new(total: u64, size: u64) -> Self {
        Self {
            size,
            count: total / size,
            next: AtomicU64::new(0),
        }
    }

    fn next(&self) -> Option<std::ops::Range<u64>> {
        let n = self.next.fetch_add(1, Ordering::Relaxed);
        let places = (FILE_MIB << 20) / self.size;
        // A step without a common factor visits every place.
        let start = n.wrapping_mul(40_503) % places * self.size;
        (n < self.count).then_some(start..start + self.size)
    }
}

fn threads(store: &Arc<dyn BlobStore>, key: &Key, at_once: usize, work: &Work) {
    std::thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                while let Some(range) = work.next() {
                    let len = range.end - range.start;
                    let bytes = store.get_range(key, range).unwrap();
                    assert_eq!(bytes.len() as u64, len);
                }
            });
        }
    });
}

fn tasks(runtime: &tokio::runtime::Runtime, url: &str, at_once: usize, work: &Work) {
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let url = format!("{url}/store/packs/aa/x");
    runtime.block_on(async {
        let one = || async {
            while let Some(range) = work.next() {
                let response = client
                    .get(&url)
                    .header("Range", format!("bytes={}-{}", range.start, range.end - 1))
                    .send()
                    .await
                    .unwrap();
                let bytes = response.bytes().await.unwrap();
                assert_eq!(bytes.len() as u64, range.end - range.start);
            }
        };
        futures_util::future::join_all((0..at_once).map(|_| one())).await;
    });
}

fn sockets(address: SocketAddr, at_once: usize, work: &Work) {
    std::thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                let mut stream = TcpStream::connect(address).unwrap();
                stream.set_nodelay(true).unwrap();
                let mut head = vec![0; 4096];
                while let Some(range) = work.next() {
                    let request = format!(
                        "GET /store/packs/aa/x HTTP/1.1\r\nHost: x\r\nRange: bytes={}-{}\r\n\r\n",
                        range.start,
                        range.end - 1
                    );
                    stream.write_all(request.as_bytes()).unwrap();
                    let mut have = 0;
                    let end = loop {
                        have += stream.read(&mut head[have..]).unwrap();
                        let found = head[..have].windows(4).position(|w| w == b"\r\n\r\n");
                        if let Some(end) = found {
                            break end + 4;
                        }
                    };
                    let mut bytes = vec![0; usize::try_from(work.size).unwrap()];
                    let early = have - end;
                    bytes[..early].copy_from_slice(&head[end..have]);
                    stream.read_exact(&mut bytes[early..]).unwrap();
                }
            });
        }
    });
}
