# distributed k-means, no autograd anywhere
import ctypes, time
import torch, torch.distributed as dist
ctypes.CDLL(None).prctl(1, 9)

K, D, N = 12, 6, 3000
dist.init_process_group("gloo")
r, w = dist.get_rank(), dist.get_world_size()
g = torch.Generator().manual_seed(r)
true = torch.randn(K, D, generator=torch.Generator().manual_seed(77)) * 4
pts = true[torch.randint(0, K, (N,), generator=g)] + torch.randn(N, D, generator=g)
cent = pts[:K].clone()
dist.broadcast(cent, 0)
for it in range(60):
    d = torch.cdist(pts, cent)
    who = d.argmin(1)
    s = torch.zeros(K, D).index_add_(0, who, pts)
    n = torch.bincount(who, minlength=K).float()
    dist.all_reduce(s)
    dist.all_reduce(n)
    cent = s / n.clamp(min=1)[:, None]
    e = d.gather(1, who[:, None]).pow(2).mean()
    dist.all_reduce(e)
    time.sleep(0.08)
    if it % 10 == 0 and r == 0:
        print(it, round(e.item() / w, 4), flush=True)
dist.destroy_process_group()
time.sleep(0.5)
