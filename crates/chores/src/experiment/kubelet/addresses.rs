//! Addresses of simulated pods: all of 127.0.0.0/8 is this machine's own. Pure.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

/// Hosts of a block of three bytes; none ends in 0 or 255.
const HOSTS: u32 = 254;

/// Who has which address.
#[derive(Debug, Default)]
pub struct Addresses {
    masters: BTreeMap<String, Ipv4Addr>,
    others: u32,
}

impl Addresses {
    /// The address of whichever pod is the master of a job: it stands for the job's Service, too.
    pub fn master(&mut self, job: &str) -> Ipv4Addr {
        let next = self.masters.len() as u32;
        *self.masters.entry(job.to_owned()).or_insert_with(|| nth(1, next))
    }

    /// An address that no pod had before.
    pub fn fresh(&mut self) -> Ipv4Addr {
        self.others += 1;
        nth(2, self.others - 1)
    }
}

/// The `n`-th address of a block that begins with 127 and this byte.
fn nth(block: u8, n: u32) -> Ipv4Addr {
    let third = u8::try_from(n / HOSTS).expect("no experiment has 65,000 pods");
    Ipv4Addr::new(127, block, third, (n % HOSTS) as u8 + 1)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_job_keeps_the_address_of_its_master_and_pods_never_share_one() {
        let mut addresses = Addresses::default();
        let first = addresses.master("ns/a");
        assert_eq!(first, Ipv4Addr::new(127, 1, 0, 1));
        assert_eq!(addresses.master("ns/b"), Ipv4Addr::new(127, 1, 0, 2));
        assert_eq!(addresses.master("ns/a"), first);
        let others: BTreeSet<Ipv4Addr> = (0..600).map(|_| addresses.fresh()).collect();
        assert_eq!(others.len(), 600);
        assert_eq!(others.last(), Some(&Ipv4Addr::new(127, 2, 2, 92)));
    }
}
