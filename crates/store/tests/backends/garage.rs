//! The contract against Garage, a server that ignores conditional writes. Its binary is built once
//! (README.md, "Tests"); the full run of the tests uses it when it is there.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use layerpack_fixtures::{ChildGuard, ScratchDir};
use layerpack_store::blob::contract;
use layerpack_store::{GcOptions, LayerStore, S3Credentials, StoreError, open};

use crate::layers::{data_of, publish, read_all, sample};
use crate::support::s3_options;

const ACCESS_KEY: &str = "GK0123456789abcdef01234567";
const SECRET_KEY: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

struct Garage {
    endpoint: String,
    _process: ChildGuard,
    _dir: ScratchDir,
}

fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    listener.local_addr().unwrap().port()
}

fn start(program: &PathBuf) -> Garage {
    let dir = ScratchDir::new("garage").unwrap();
    let (rpc, api) = (free_port(), free_port());
    let path = dir.path().display();
    let configuration = format!(
        "metadata_dir = \"{path}/meta\"
data_dir = \"{path}/data\"
db_engine = \"sqlite\"
replication_factor = 1
compression_level = \"none\"
block_size = \"128K\"
rpc_bind_addr = \"127.0.0.1:{rpc}\"
rpc_public_addr = \"127.0.0.1:{rpc}\"
rpc_secret = \"{SECRET_KEY}\"
[s3_api]
s3_region = \"garage\"
api_bind_addr = \"127.0.0.1:{api}\"
"
    );
    let file = dir.write("garage.toml", configuration).unwrap();
    let process = ChildGuard::spawn(
        Command::new(program)
            .arg("-c")
            .arg(file)
            .args(["server", "--single-node", "--default-bucket"])
            .env("GARAGE_DEFAULT_ACCESS_KEY", ACCESS_KEY)
            .env("GARAGE_DEFAULT_SECRET_KEY", SECRET_KEY)
            .env("GARAGE_DEFAULT_BUCKET", "layers")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null()),
    )
    .unwrap();
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, api));
    let begun = Instant::now();
    while TcpStream::connect(address).is_err() {
        assert!(
            begun.elapsed() < Duration::from_secs(30),
            "it does not start"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    Garage {
        endpoint: format!("http://{address}"),
        _process: process,
        _dir: dir,
    }
}

#[test]
fn contract_and_publishing_hold() {
    if std::env::var_os("LAYERPACK_TEST_FULL").is_none() {
        layerpack_fixtures::skip!("only in the full run");
    }
    let built = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../target/garage/bin/garage");
    let program = std::env::var_os("LAYERPACK_GARAGE").map_or(built, PathBuf::from);
    if !program.is_file() {
        layerpack_fixtures::skip!("garage is not built");
    }
    let server = start(&program);
    let mut options = s3_options();
    options.s3_credentials = Some(S3Credentials {
        access_key: ACCESS_KEY.to_owned(),
        secret_key: SECRET_KEY.to_owned(),
        session_token: None,
    });
    // It answers before its bucket is there.
    options.retry.attempts = 20;
    let url = |prefix| {
        format!(
            "s3://layers/{prefix}?endpoint={}&region=garage",
            server.endpoint
        )
    };
    let begun = Instant::now();
    while let Err(error) = open(&url("x"), &options).unwrap().list("") {
        assert!(begun.elapsed() < Duration::from_secs(30), "{error:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
    contract::run(&|| open(&url("contract"), &options).unwrap()).unwrap();

    let store = LayerStore::new(open(&url("layers"), &options).unwrap());
    publish(&store, "base/x:1", &sample(1)).unwrap();
    assert_eq!(read_all(&store, "base/x:1").unwrap(), data_of(&sample(1)));
    let error = publish(&store, "base/x:1", &sample(2)).unwrap_err();
    assert!(matches!(error, StoreError::Conflict { .. }), "{error:?}");

    // It ignores conditions, so of writers of one version at once the claims decide: one wins.
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let writers: Vec<_> = (10..13_u64)
            .map(|seed| {
                let store = LayerStore::new(open(&url("layers"), &options).unwrap());
                scope.spawn(move || (seed, publish(&store, "base/race:1", &sample(seed))))
            })
            .collect();
        writers.into_iter().map(|w| w.join().unwrap()).collect()
    });
    let mut winners = Vec::new();
    for (seed, outcome) in outcomes {
        match outcome {
            Ok(_) => winners.push(seed),
            Err(StoreError::Conflict { .. }) => {}
            Err(error) => panic!("{error:?}"),
        }
    }
    assert_eq!(winners.len(), 1, "{winners:?}");
    let data = read_all(&store, "base/race:1").unwrap();
    assert!(data == data_of(&sample(winners[0])), "not the winner's");

    // What the others left is collected, and all that is published stays.
    let collection = GcOptions {
        grace: Duration::ZERO,
        dry_run: false,
        wait: true,
    };
    let report = store.collect(collection).unwrap();
    assert!(report.deleted.objects > 0, "{report:?}");
    let audit = store.audit(true).unwrap();
    assert!(audit.damaged.is_empty(), "{:?}", audit.damaged);
    assert_eq!(audit.layers.len(), 2);
}
