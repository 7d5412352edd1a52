#note
@problemName Toy
@timeStamps false
@univariate false
@dimensions 2
@classLabel true up down
@data
0,0,1:0,1,0:down
