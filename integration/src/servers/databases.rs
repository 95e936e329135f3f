//! PostgreSQL and MariaDB, with a small table in memory. Neither server runs as root: if the caller is root, it runs as
//! the user that its package has made. A run makes the data once, without the library, and each round starts a server
//! on the data.

use std::path::Path;

use anyhow::{Context, Result};
use nix::unistd::{User, chown, geteuid};
use tempfile::TempDir;

use super::Service;
use crate::lab::{Lab, Mode, Role};
use crate::ports::free_port;
use crate::proc::{Cmd, find, wait_until};

/// The name of the database that the tables are in.
pub const DATABASE: &str = "bench";
/// The user that owns the database, without a password. Both servers listen on the loopback interface only.
pub const USER: &str = "bench";

/// A data folder. It is made when a server first needs it, and removed with its owner.
#[derive(Debug, Default)]
pub struct Data(std::cell::OnceCell<TempDir>);

impl Data {
    /// Returns the folder; `make` fills it the first time.
    fn folder(&self, user: Option<&User>, make: impl FnOnce(&Path) -> Result<()>) -> Result<&Path> {
        if let Some(dir) = self.0.get() {
            return Ok(dir.path());
        }
        let dir = tempfile::Builder::new().prefix("rdmasock-data-").tempdir()?;
        if let Some(user) = user {
            chown(dir.path(), Some(user.uid), Some(user.gid))?;
        }
        make(dir.path())?;
        Ok(self.0.get_or_init(|| dir).path())
    }
}

/// Returns the user that runs a server, or `None` if the caller is not root.
fn user(name: &str) -> Result<Option<User>> {
    if !geteuid().is_root() {
        return Ok(None);
    }
    let user =
        User::from_name(name)?.with_context(|| format!("there is no user {name}, which the server's package makes"))?;
    Ok(Some(user))
}

fn owned(cmd: Cmd, user: Option<&User>) -> Cmd {
    match user {
        Some(user) => cmd.owner(user.uid, user.gid),
        None => cmd,
    }
}

/// Returns the path of a program of PostgreSQL, in its newest version. The programs in /usr/bin are scripts around
/// these.
///
/// # Errors
/// If the program is not installed.
pub fn postgres_program(name: &str) -> Result<String> {
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten();
    let newest = versions
        .flatten()
        .filter_map(|version| {
            let number: u32 = version.file_name().to_str()?.parse().ok()?;
            let path = version.path().join("bin").join(name);
            path.is_file().then_some((number, path))
        })
        .max();
    match newest {
        Some((_, path)) => Ok(path.display().to_string()),
        None => Ok(find(name)?.display().to_string()),
    }
}

/// PostgreSQL with pgbench's tables of scale 10, which is 1,000,000 rows. It has a process for each connection.
#[derive(Debug, Default)]
pub struct Postgres(Data);

impl Postgres {
    /// Starts a server on the data, which is made first if there is none.
    ///
    /// # Errors
    /// If the server does not start in time.
    pub fn start(&self, lab: &Lab, role: Role) -> Result<Service> {
        let user = user("postgres")?;
        let folder = self.0.folder(user.as_ref(), |folder| {
            let lab = Lab::new(Mode::Kernel, None, lab.deadline() - std::time::Instant::now())?;
            let initdb = lab
                .cmd(Role::Outsider, &postgres_program("initdb")?)?
                .args(["-A", "trust", "-N", "-E", "UTF8", "--locale=C", "-U", USER, "-D"])
                .args([folder]);
            lab.run(owned(initdb, user.as_ref()))?;
            let server = Self::serve(&lab, Role::Outsider, folder, user.as_ref())?;
            let port = server.port.to_string();
            let to = ["-h", "127.0.0.1", "-p", &port, "-U", USER];
            let createdb = lab.cmd(Role::Outsider, &postgres_program("createdb")?)?;
            lab.run(createdb.args(to).args([DATABASE]))?;
            let pgbench = lab.cmd(Role::Outsider, &postgres_program("pgbench")?)?;
            lab.run(pgbench.args(["-i", "-q", "-s", "10"]).args(to).args([DATABASE]))?;
            Ok(())
        })?;
        Self::serve(lab, role, folder, user.as_ref())
    }

    fn serve(lab: &Lab, role: Role, folder: &Path, user: Option<&User>) -> Result<Service> {
        let port = free_port()?;
        let cmd = lab
            .cmd(role, &postgres_program("postgres")?)?
            .args([Path::new("-D"), folder])
            .args(["-p", &port.to_string()])
            .args(
                [
                    "listen_addresses=127.0.0.1",
                    "unix_socket_directories=",
                    "max_connections=200",
                    "fsync=off",
                    "autovacuum=off",
                    "jit=off",
                    "shared_buffers=256MB",
                ]
                .into_iter()
                .flat_map(|setting| ["-c", setting]),
            );
        let mut proc = lab.serve(owned(cmd, user), port)?;
        // PostgreSQL listens before it is ready, and refuses clients until then. The last line of this file has its
        // status.
        let status = folder.join("postmaster.pid");
        wait_until("PostgreSQL to be ready", lab.deadline(), || {
            proc.check_running()?;
            Ok(std::fs::read_to_string(&status)?.trim_end().ends_with("ready"))
        })?;
        Ok(Service { proc, port })
    }
}

/// MariaDB with sysbench's table of 100,000 rows. It has a thread for each connection.
#[derive(Debug, Default)]
pub struct MariaDb(Data);

impl MariaDb {
    /// Starts a server on the data, which is made first if there is none.
    ///
    /// # Errors
    /// If the server does not start in time.
    pub fn start(&self, lab: &Lab, role: Role) -> Result<Service> {
        let user = user("mysql")?;
        let folder = self.0.folder(user.as_ref(), |folder| {
            let lab = Lab::new(Mode::Kernel, None, lab.deadline() - std::time::Instant::now())?;
            let data = folder.join("data");
            let install = lab
                .cmd(Role::Outsider, "mariadb-install-db")?
                .args(["--no-defaults", "--auth-root-authentication-method=normal"])
                .args(["--skip-test-db", &format!("--datadir={}", data.display())]);
            lab.run(owned(install, user.as_ref()))?;
            let commands = format!(
                "CREATE DATABASE IF NOT EXISTS {DATABASE};\n\
                 CREATE USER IF NOT EXISTS '{USER}'@'127.0.0.1';\n\
                 GRANT ALL ON {DATABASE}.* TO '{USER}'@'127.0.0.1';\n"
            );
            std::fs::write(folder.join("init.sql"), commands)?;
            let server = Self::serve(&lab, Role::Outsider, folder, user.as_ref())?;
            let prepare = sysbench(&lab, Role::Outsider, server.port, "oltp_read_write")?;
            lab.run(prepare.args(["prepare"]))?;
            Ok(())
        })?;
        Self::serve(lab, role, folder, user.as_ref())
    }

    fn serve(lab: &Lab, role: Role, folder: &Path, user: Option<&User>) -> Result<Service> {
        let port = free_port()?;
        let path = |option: &str, name: &str| format!("--{option}={}", folder.join(name).display());
        let cmd = lab
            .cmd(role, "mariadbd")?
            .args(["--no-defaults", "--bind-address=127.0.0.1", "--skip-name-resolve"])
            .args([
                format!("--port={port}"),
                path("datadir", "data"),
                path("init-file", "init.sql"),
                path("socket", "socket"),
                path("pid-file", "pid"),
            ])
            .args(["--max-connections=200", "--innodb-flush-log-at-trx-commit=0"])
            .args(["--innodb-doublewrite=0", "--sync-binlog=0", "--skip-log-bin"]);
        Ok(Service {
            proc: lab.serve(owned(cmd, user), port)?,
            port,
        })
    }
}

/// Returns the command that runs one of sysbench's tests on [`MariaDb`]. The caller appends sysbench's command and
/// further options.
///
/// # Errors
/// If sysbench is not installed.
pub fn sysbench(lab: &Lab, role: Role, port: u16, test: &str) -> Result<Cmd> {
    Ok(lab.cmd(role, "sysbench")?.args([
        test,
        "--db-driver=mysql",
        "--mysql-host=127.0.0.1",
        &format!("--mysql-port={port}"),
        &format!("--mysql-user={USER}"),
        &format!("--mysql-db={DATABASE}"),
        "--tables=1",
        "--table-size=100000",
    ]))
}
