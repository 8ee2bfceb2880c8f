import sys, time, torch, nibble.torch as nt
from nibble import _nibble
g = torch.Generator(device="cuda").manual_seed(0)
E,T,d,f,k=8,512,1024,512,2
r = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16, generator=g)
x = r(T, d).requires_grad_(); gu = (r(E, 2*f, d)/d**.5).requires_grad_(); dn = (r(E, d, f)/f**.5).requires_grad_()
ex = torch.stack([torch.randperm(E, device="cuda")[:k] for _ in range(64)]).repeat(T//64,1).int()
gate = torch.full((T, k), 1/k, device="cuda").requires_grad_(); dy = r(T, d)
R="mxfp4-hopper"
def host(call,n=300):
    for _ in range(10): call()
    best=1e9
    for _ in range(5):
        torch.cuda.synchronize(); s=time.perf_counter()
        for _ in range(n): call()
        best=min(best,1e6*(time.perf_counter()-s)/n)
    torch.cuda.synchronize()
    return round(best)
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx,x,gu,dn,ex,gate,t,r,n,s,k,c):
        ctx.save_for_backward(gu,dn,ex,gate); ctx.l=(r,n,s); return torch.empty_like(x)
    @staticmethod
    def backward(ctx,dy):
        gu,dn,ex,gate=ctx.saved_tensors
        return torch.empty_like(dy),torch.empty_like(gu),torch.empty_like(dn),None,torch.empty_like(gate),None,None,None,None,None,None
def empty():
    for p in (x,gu,dn,gate): p.grad=None
    F.apply(x,gu,dn,ex,gate,None,R,"experts",0,None,None).backward(dy)
def run():
    for p in (x,gu,dn,gate): p.grad=None
    nt.experts(x,gu,dn,ex,gate,recipe=R).backward(dy)
def same():
    with nt.same_weights(): run()
a=[v.detach() for v in (x,gu,dn,ex,gate)]
fw=lambda: _nibble.experts_forward(*a,None,R,"experts",0)
y,saved,_=fw()
bw=lambda: _nibble.experts_backward(saved,*a[1:],dy,None,R,"experts",0,[True,True])
op=lambda: torch.ops.nibble.experts.default(*a,None,R,"experts",0)
opb=lambda: torch.ops.nibble.experts_backward.default(saved,*a[1:],dy,None,R,"experts",0,[True,True])
print("both",host(run),"same_weights",host(same),"native forward",host(fw),"native backward",host(bw),"operator forward",host(op),"operator backward",host(opb),"an empty function, both",host(empty),"graph",host(lambda: nt.experts(x,gu,dn,ex,gate,recipe=R)))
w=torch.nn.Linear(1024,1024,device="cuda",dtype=torch.bfloat16)
def lin():
    w.weight.grad=None; w.bias.grad=None; x.grad=None
    w(x).backward(dy)
print("torch.nn.Linear both",host(lin))
