//! Getting in: passwords, tokens, helpers, and who sees what.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use layerpack_fixtures::servers::{
    DockerRegistry, REGISTRY_PASSWORD, REGISTRY_USER, Reply, Request, Scripted,
};
use layerpack_store::StoreError;
use layerpack_store::registry::{Pushed, Registry, RegistryOptions, Sha256, Upload};

use crate::support::{Counter, Proxied, host, options, repository};

fn with(files: &[PathBuf]) -> RegistryOptions {
    RegistryOptions {
        credential_files: files.to_vec(),
        ..options()
    }
}

fn push(registry: &Registry, text: &'static str) -> Result<Pushed, StoreError> {
    let upload = Upload::Bytes(text.as_bytes().into());
    registry.push_blob(&Sha256::of(text.as_bytes()), &upload, &[])
}

#[track_caller]
fn denied<T: std::fmt::Debug>(result: Result<T, StoreError>) -> String {
    match result {
        Err(error @ StoreError::Denied { .. }) => error.to_string(),
        other => panic!("not denied: {other:?}"),
    }
}

#[test]
fn a_password_opens() {
    let server = DockerRegistry::locked().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let good = dir.path().join("good.json");
    DockerRegistry::credentials(&server.host(), &good).unwrap();
    let registry = repository(&server.host(), with(&[dir.path().join("none"), good]));
    assert_eq!(push(&registry, "blob").unwrap(), Pushed::Sent);
    assert_eq!(registry.tags().unwrap(), [""; 0]);

    let text = denied(repository(&server.host(), options()).tags());
    assert!(text.contains(&server.host()), "{text}");
    let wrong = dir.path().join("wrong.json");
    let config = format!(
        r#"{{"auths":{{"{}":{{"username":"ali","password":"geheim"}}}}}}"#,
        server.host()
    );
    fs_err::write(&wrong, config).unwrap();
    let text = denied(repository(&server.host(), with(&[wrong])).tags());
    assert!(text.contains("401") && !text.contains("geheim"), "{text}");
}

/// A registry that lets tokens in, and the server that gives them out.
struct Tokens {
    server: Proxied,
    asked: Counter,
    /// What the token server was asked, one line each.
    log: Arc<Mutex<Vec<String>>>,
}

impl Tokens {
    /// Tokens are good for `uses` requests and say that they live for `life` seconds.
    fn start(uses: u64, life: u64, anonymous: bool) -> Self {
        let asked = Counter::default();
        let used = Counter::default();
        let log = Arc::new(Mutex::new(Vec::new()));
        let (asked_too, log_too) = (asked.clone(), Arc::clone(&log));
        let server = Proxied::start(move |request, _| {
            let at = request.header("host").unwrap_or_default().to_owned();
            if request.target.starts_with("/token") {
                let n = asked_too.next();
                let authorization = request.header("authorization").unwrap_or_default();
                let body = String::from_utf8_lossy(&request.body).into_owned();
                log_too.lock().unwrap().push(format!(
                    "{} {} {authorization} {body}",
                    request.method, request.target
                ));
                let known = authorization.starts_with("Basic ") || body.contains("refresh_token=");
                return Some(if known || anonymous {
                    let token = format!(r#"{{"token":"t{n}","expires_in":{life}}}"#);
                    Reply::new(200, token)
                } else {
                    Reply::new(
                        401,
                        r#"{"errors":[{"code":"UNAUTHORIZED","message":"who?"}]}"#,
                    )
                });
            }
            // The newest token is good, for a while.
            let newest = asked_too.get();
            let good = request
                .header("authorization")
                .is_some_and(|header| newest > 0 && header == format!("Bearer t{}", newest - 1));
            if good && used.next() % uses < uses - u64::from(uses < u64::MAX) {
                return None;
            }
            let scope = if request.method == "GET" || request.method == "HEAD" {
                "pull"
            } else {
                "pull,push"
            };
            Some(Reply::new(401, "").header(
                "WWW-Authenticate",
                format!(
                    r#"Bearer realm="http://{at}/token",service="s",scope="repository:some/where:{scope}""#
                ),
            ))
        });
        Self { server, asked, log }
    }

    fn log(&self) -> Vec<String> {
        self.log.lock().unwrap().clone()
    }
}

#[test]
fn anonymous_tokens_are_used_until_they_end() {
    let tokens = Tokens::start(u64::MAX, 300, true);
    let registry = repository(&tokens.server.host(), options());
    for _ in 0..5 {
        registry.tags().unwrap();
    }
    assert_eq!(tokens.asked.get(), 1);
    let log = tokens.log();
    assert!(
        log[0].contains("scope=repository%3Asome%2Fwhere%3Apull"),
        "{log:?}"
    );
    assert!(log[0].contains("service=s"), "{log:?}");
    // Another right, another token; this server's newest alone is good.
    push(&registry, "blob").unwrap();
    let log = tokens.log();
    assert!(log[1].contains("pull%2Cpush"), "{log:?}");
}

#[test]
fn a_token_that_is_refused_early_is_fetched_anew() {
    // Every third request is refused whatever it shows.
    let tokens = Tokens::start(3, 300, true);
    let registry = repository(&tokens.server.host(), options());
    for _ in 0..6 {
        registry.tags().unwrap();
    }
    assert!(tokens.asked.get() > 1);
}

#[test]
fn an_expired_token_is_not_shown() {
    let tokens = Tokens::start(u64::MAX, 0, true);
    let registry = repository(&tokens.server.host(), options());
    registry.tags().unwrap();
    let requests = tokens.server.proxy.requests();
    registry.tags().unwrap();
    // A token and the list: nothing was refused in between.
    assert_eq!(tokens.server.proxy.requests() - requests, 2);
    assert_eq!(tokens.asked.get(), 2);
}

#[test]
fn tokens_are_asked_for_with_what_the_configuration_has() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.json");
    let tokens = Tokens::start(u64::MAX, 300, false);
    let at = tokens.server.host();
    let text = denied(repository(&at, options()).tags());
    assert!(
        text.contains("token server") && text.contains("who?"),
        "{text}"
    );

    DockerRegistry::credentials(&at, &config).unwrap();
    repository(&at, with(std::slice::from_ref(&config)))
        .tags()
        .unwrap();
    let log = tokens.log();
    let last = log.last().unwrap();
    assert!(
        last.contains("account=ali") && last.contains("Basic YWxpOm9wZW4gc2VzYW1l"),
        "{last}"
    );

    fs_err::write(
        &config,
        format!(r#"{{"auths":{{"{at}":{{"identitytoken":"lasting"}}}}}}"#),
    )
    .unwrap();
    repository(&at, with(std::slice::from_ref(&config)))
        .tags()
        .unwrap();
    let log = tokens.log();
    let last = log.last().unwrap();
    assert!(
        last.starts_with("POST /token ") && last.contains("refresh_token=lasting"),
        "{last}"
    );
    assert!(!last.contains("Basic"), "{last}");
}

/// Writes a credential helper; its directory has to be in the path.
fn helper(dir: &Path, name: &str, script: &str) {
    let path = dir.join(format!("docker-credential-{name}"));
    fs_err::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs_err::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// One test, in a process of its own, since the path belongs to the process.
#[test]
fn helpers_are_asked() {
    const INSIDE: &str = "LAYERPACK_TEST_HELPERS";
    if std::env::var_os(INSIDE).is_none() {
        let dir = tempfile::tempdir().unwrap();
        let mut path = dir.path().as_os_str().to_owned();
        path.push(":");
        path.push(std::env::var_os("PATH").unwrap());
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "auth::helpers_are_asked", "--nocapture"])
            .env(INSIDE, dir.path())
            .env("PATH", path)
            .status()
            .unwrap();
        assert!(status.success());
        return;
    }
    let dir = PathBuf::from(std::env::var_os(INSIDE).unwrap());
    let server = DockerRegistry::locked().unwrap();
    let at = server.host();
    let answer = format!(
        r#"[ "$1" = get ] && read host; [ "$host" = "{at}" ] || {{ echo "credentials not found in native keychain"; exit 1; }}
echo '{{"ServerURL":"x","Username":"{REGISTRY_USER}","Secret":"{REGISTRY_PASSWORD}"}}'"#
    );
    helper(&dir, "good", &answer);
    helper(&dir, "broken", "echo boom; exit 3");
    helper(&dir, "odd", "echo geheim");
    helper(&dir, "slow", "exec sleep 1000");
    helper(
        &dir,
        "stuck",
        "sleep 1000 >/dev/null & exec sleep 1000 <&- >&-",
    );
    let config = dir.join("config.json");
    let tags = |text: &str, limit: u64| {
        fs_err::write(&config, text.replace("HOST", &at)).unwrap();
        let options = RegistryOptions {
            helper_limit: Duration::from_millis(limit),
            ..with(std::slice::from_ref(&config))
        };
        repository(&at, options).tags()
    };
    let long = 60_000;
    tags(r#"{"credHelpers":{"HOST":"good"}}"#, long).unwrap();
    tags(r#"{"credsStore":"good"}"#, long).unwrap();
    // The helper of this host comes first; one that knows nothing leaves it to the file.
    tags(
        r#"{"credsStore":"broken","credHelpers":{"HOST":"good"}}"#,
        long,
    )
    .unwrap();
    helper(
        &dir,
        "empty",
        "echo credentials not found in native keychain; exit 1",
    );
    tags(
        r#"{"credsStore":"empty","auths":{"HOST":{"auth":"YWxpOm9wZW4gc2VzYW1l"}}}"#,
        long,
    )
    .unwrap();
    for (name, limit, says) in [
        ("broken", long, "boom"),
        ("odd", long, "something else than credentials"),
        ("slow", 200, "did not answer"),
        ("stuck", 200, "did not answer"),
        ("none", long, "docker-credential-none"),
    ] {
        let text = denied(tags(
            &format!(r#"{{"credHelpers":{{"HOST":"{name}"}}}}"#),
            limit,
        ));
        assert!(
            text.contains(says) && !text.contains("geheim"),
            "{name}: {text}"
        );
    }
}

#[test]
fn only_the_registry_sees_the_credentials() {
    let blob = b"the bytes";
    let digest = Sha256::of(blob);
    let seen: Arc<Mutex<Vec<Request>>> = Arc::default();
    let seen_too = Arc::clone(&seen);
    let storage = Scripted::start(move |request| {
        seen_too.lock().unwrap().push(request.clone());
        Reply::of(blob, request)
    })
    .unwrap();
    let to = storage.url();
    let server = Scripted::start(move |request| {
        if request.header("authorization").is_none() {
            return Reply::new(401, "").header("WWW-Authenticate", "Basic realm=\"x\"");
        }
        Reply::new(307, "").header("Location", format!("{to}/store?signature=abc"))
    })
    .unwrap();
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.json");
    DockerRegistry::credentials(&host(&server), &config).unwrap();
    let registry = repository(&host(&server), with(&[config]));
    assert_eq!(registry.blob(&digest, 9).unwrap().unwrap(), blob);
    assert_eq!(registry.blob_range(&digest, 9, 4..6).unwrap(), b"by");
    let seen = seen.lock().unwrap();
    assert_eq!(seen.len(), 2);
    for request in seen.iter() {
        assert_eq!(request.target, "/store?signature=abc");
        assert_eq!(request.header("authorization"), None);
    }
}

#[test]
fn nothing_leads_away_from_tls_or_in_circles() {
    let lead = |to: &'static str| {
        let server = Scripted::start(move |_| Reply::new(302, "").header("Location", to)).unwrap();
        let registry = repository(&host(&server), options());
        denied(registry.blob(&Sha256::of(b"x"), 1))
    };
    // This registry is on loopback, where plain http is fine; other machines are not.
    for to in [
        "http://storage.example/x",
        "http://10.0.0.1/x",
        "file:///etc/passwd",
        "data:x",
    ] {
        let text = lead(to);
        assert!(text.contains("TLS"), "{to}: {text}");
    }
    assert!(lead("/again").contains("redirects"));

    let token = Scripted::start(|_| {
        Reply::new(401, "").header("WWW-Authenticate", "Bearer realm=\"http://token.example/\"")
    })
    .unwrap();
    let text = denied(repository(&host(&token), options()).tags());
    assert!(text.contains("TLS"), "{text}");
}
